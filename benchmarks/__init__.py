"""Benchmarks: `make bench` runs them all; each also runs by itself (`python -m benchmarks.training`)."""
