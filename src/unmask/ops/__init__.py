"""Kernels: fast versions of operations, each in one module with its meaning in plain torch.

The plain version runs wherever the fast one does not apply. To read or debug a model without any fast path,
run it within `unmask.ops.fast_paths(False)`, or set the environment variable `UNMASK_PLAIN=1`.
"""

from __future__ import annotations

from unmask.ops.switch import fast_paths

__all__ = ["fast_paths"]
