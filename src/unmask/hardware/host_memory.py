"""Whether what is asked for fits into memory, told before work begins."""

from __future__ import annotations

import os
from pathlib import Path

_BYTES_PER_TOKEN = 128
"""Bytes that samplers keep of each token: ids, noise, steps and times, and copies of them."""
_BYTES_PER_FEATURE = 64
"""Bytes of each feature of each token that is read at once: a block's activations, in float32."""
_CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def _available_memory() -> int | None:
    """Bytes that this process may have: the machine's or, if that is less, its container's."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told by every system
        return None
    try:
        limit = int(_CGROUP_MEMORY_MAX.read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return found
    return min(found, limit)


def check_memory(n: object, length: object, max_length: int | None, hidden_size: int) -> None:
    """Refuse so many texts of so many tokens, of which the model reads `at_once`, if they cannot be held."""
    if not isinstance(n, int) or not isinstance(length, int) or n < 1 or length < 1:
        return  # for those who know what it should be
    needed = n * (length * _BYTES_PER_TOKEN + min(length, max_length or length) * hidden_size * _BYTES_PER_FEATURE)
    there = _available_memory()
    if there is not None and needed > there:
        raise ValueError(
            f"{n:,} {'text' if n == 1 else 'texts'} of {length:,} tokens would need about"
            f" {_format_bytes(needed)} of memory, and there are {_format_bytes(there)}: ask for fewer or shorter texts"
        )


def _format_bytes(num_bytes: int) -> str:
    for name, size in (("TB", 10**12), ("GB", 10**9)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.0f} {name}" if num_bytes >= 10 * size else f"{num_bytes / size:,.1f} {name}"
    return f"{num_bytes / 10**6:,.0f} MB"
