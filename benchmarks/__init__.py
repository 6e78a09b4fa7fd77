"""Programs that measure: `unmask bench` runs them all, and each runs by itself (`python -m benchmarks.training`)."""
