"""Whether what is asked for fits into memory, told before work begins."""

from __future__ import annotations

import os
from pathlib import Path

PER_TOKEN = 128
"""Bytes that samplers keep of each token: ids, noise, steps and times, and copies of them."""
PER_FEATURE = 64
"""Bytes of each feature of each token that is read at once: a block's activations, in float32."""
CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory() -> int | None:
    """Bytes that this process may have: the machine's or, if that is less, its container's."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told by every system
        return None
    try:
        limit = int(CGROUP.read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return found
    return min(found, limit)


def check_room(rows: object, length: object, at_once: int | None, width: int) -> None:
    """Refuse so many texts of so many tokens, of which the model reads `at_once`, if they cannot be held."""
    if not isinstance(rows, int) or not isinstance(length, int) or rows < 1 or length < 1:
        return  # for those who know what it should be
    needed = rows * (length * PER_TOKEN + min(length, at_once or length) * width * PER_FEATURE)
    there = memory()
    if there is not None and needed > there:
        raise ValueError(
            f"{rows:,} {'text' if rows == 1 else 'texts'} of {length:,} tokens would need about"
            f" {_size(needed)} of memory, and there are {_size(there)}: ask for fewer or shorter texts"
        )


def _size(number: int) -> str:
    for name, size in (("TB", 10**12), ("GB", 10**9)):
        if number >= size:
            return f"{number / size:,.0f} {name}" if number >= 10 * size else f"{number / size:,.1f} {name}"
    return f"{number / 10**6:,.0f} MB"
