"""Kernels: fast implementations of operations that plain torch also has."""
