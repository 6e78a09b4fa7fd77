"""Host memory: whether work fits, what to do when memory ran out, and how the process reuses it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

_BYTES_PER_TOKEN = 128
"""Bytes that samplers keep of each token: ids, noise, steps and times, and copies of them."""
_BYTES_PER_FEATURE = 64
"""Bytes of each feature of each token that is read at once: a block's activations, in float32."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def _available_memory() -> int | None:
    """Bytes that this process may have: the machine's or, if that is less, its container's."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # unknown on this system
        return None
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # none, or "max"
        return total
    return min(total, limit)


def check_memory(n: object, length: object, max_length: int | None, hidden_size: int) -> None:
    """Refuse n texts of `length` tokens, of which the model reads `max_length` at once, if memory cannot hold them."""
    if not isinstance(n, int) or not isinstance(length, int) or n < 1 or length < 1:
        return  # refused elsewhere, with a better sentence
    needed = n * (length * _BYTES_PER_TOKEN + min(length, max_length or length) * hidden_size * _BYTES_PER_FEATURE)
    available = _available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"{n:,} {'text' if n == 1 else 'texts'} of {length:,} tokens would need about"
            f" {_format_bytes(needed)} of memory, and {_format_bytes(available)} are available:"
            " generate fewer or shorter texts"
        )


def require_memory(name: str, sizes: Mapping[str, int], dtype: str, device: torch.device) -> None:
    """Refuse a model whose weights have sizes[dtype] bytes if so many are not free, with the types that would fit."""
    free = _free_memory(device)
    if free is None or sizes[dtype] <= free:
        return
    fitting = [f"{other} (about {_format_bytes(size)})" for other, size in sizes.items() if size <= free]
    remedy = f"choose the dtype {' or '.join(fitting)}, or" if fitting else "free some memory, or"
    raise ValueError(
        f"{name} needs about {_format_bytes(sizes[dtype])} of memory with the dtype {dtype}, and"
        f" {_format_bytes(free)} are free: {remedy} split its weights over several processes"
    )


def _free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still get; None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [each for each in (_free_host_memory(), _free_group_memory()) if each is not None]
    return min(free, default=None)


def _free_host_memory() -> int | None:
    """Free memory of the machine, including what the system would give up."""
    with suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return None


def _free_group_memory() -> int | None:
    """Free memory of the container, if it has a limit; pages of files that it would give up count as free."""
    with suppress(OSError, ValueError, StopIteration):
        limit, used = (int((_CGROUP / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        return limit - used + int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
    return None


def _format_bytes(num_bytes: int) -> str:
    for name, size in (("TB", 10**12), ("GB", 10**9)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.0f} {name}" if num_bytes >= 10 * size else f"{num_bytes / size:,.1f} {name}"
    return f"{num_bytes / 10**6:,.0f} MB"


def retain_freed_memory() -> None:
    """Make the C library (glibc) keep freed memory for this process, unless the environment configures it.

    By default large blocks return to the system and come back as new pages, which must be zeroed: with 50,000
    tokens and bfloat16, that is a tenth of every step.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):  # other libraries, other systems
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold, largest = -1, -3, 2**31 - 1
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, largest)


class OutOfMemoryError(RuntimeError):
    """There was not enough memory for a step."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch has no class for it on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error)
    signs = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(sign in message for sign in signs)


def oom_advice(microbatch_size: int) -> str:
    """What to do when `microbatch_size` rows at once are too many."""
    if microbatch_size <= 1:
        return "one row at once was too much, so take a smaller network or shorter rows"
    return (
        f"{microbatch_size} rows at once were too many, so try microbatch_size={microbatch_size // 2},"
        " which means the same"
    )
