"""Files: atomic writes, locks, checksums, untrusted JSON."""
