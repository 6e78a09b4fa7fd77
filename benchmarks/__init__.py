"""Programs that measure: `make bench` runs them; each runs alone, too (`python -m benchmarks.training`)."""
