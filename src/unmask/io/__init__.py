"""Files: atomic replacement, locks, checksums, errors, untrusted files, the hub."""
