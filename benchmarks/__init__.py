"""Programs that measure: `unmask bench` runs them; each runs alone, too (`python -m benchmarks.training`)."""
