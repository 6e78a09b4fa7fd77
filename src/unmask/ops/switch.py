"""The switch that turns all fast paths off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_enabled = os.environ.get("UNMASK_PLAIN", "0") in ("", "0")


def fast_paths_enabled() -> bool:
    """Whether kernels may take a fast path; False if only plain torch is to run."""
    return _enabled


@contextmanager
def fast_paths(enabled: bool) -> Iterator[None]:
    """Within this context, all threads take the fast paths, or none of them.

    Results are the same up to rounding. Without fast paths a training step needs more time and memory.
    """
    global _enabled
    before, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = before
