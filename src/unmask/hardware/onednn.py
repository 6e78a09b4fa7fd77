"""Smaller caches for oneDNN's kernels.

oneDNN compiles a kernel for each shape of a matrix product and caches the last 1,024; torch's layer above it
caches 1,024 more, with their workspaces. A server and a file of requests meet many shapes, so both caches fill up:
about 700 MB for any model. Compiling a kernel again costs nothing measurable.
"""

from __future__ import annotations

import os

_CACHE_CAPACITY = 32
"""Cached kernels; a few forward passes use as many. (Torch crashes with 0.)"""

_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that torch reads at its first matrix product."""


def limit_onednn_caches() -> None:
    """Limit the caches; call this before torch computes. Variables that are set already are not changed."""
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, str(_CACHE_CAPACITY))
