"""FLOP/s that the machine reaches, and FLOPs that a piece of work takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Sizes of the square matrices that are multiplied to measure the peak, as far as the time suffices."""


def measure_peak_flops(dtype: torch.dtype, device: torch.device, seconds: float = 0.4) -> float:
    """FLOP/s of the fastest of many square matrix products, by all threads of this process.

    The first ones are slow (threads start, other processes compute), so all sizes take turns until `seconds` are
    over; a size is left out while one product of it would take longer than the time that remains.
    """
    # A separate generator: measuring must not change the random numbers of a run.
    random = torch.Generator().manual_seed(0)
    best, matrices, deadline = 0.0, dict[int, torch.Tensor](), time.perf_counter() + seconds
    while (left := deadline - time.perf_counter()) > 0:
        for size in _MATMUL_SIZES:
            if size > _MATMUL_SIZES[0] and 2 * size**3 > best * left:
                break
            if size not in matrices:
                matrices[size] = torch.rand(size, size, generator=random).to(device, dtype)
            best = max(best, 2 * size**3 / _time_matmul(matrices[size]))
            left = deadline - time.perf_counter()
    return best


@cache
def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """`measure_peak_flops`, measured once in a process."""
    return measure_peak_flops(dtype, device)


def _time_matmul(a: torch.Tensor) -> float:
    _synchronize(a.device)
    started = time.perf_counter()
    a @ a
    _synchronize(a.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class FlopCount:
    """FLOPs of the matrix products in a `count_flops` block, once it has ended."""

    flops: int = 0


@contextmanager
def count_flops(enabled: bool) -> Iterator[FlopCount]:
    """Count the FLOPs of matrix products, attention included, if `enabled`.

    Operators inside compiled code are invisible, so a counted step runs eagerly.
    """
    count = FlopCount()
    if not enabled:
        yield count
        return
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_FLOP_FORMULAS)
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    # Without the stance, the compiler would see the counter once and then never compile the code again.
    with torch.compiler.set_stance("force_eager"), counter:
        yield count
    count.flops = counter.get_total_flops()


class _NoModuleTracker:
    """Replaces the counter's list of modules, which keeps their inputs alive until the end."""

    parents = frozenset(("Global",))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes [B, heads, L, width]: Q K^T, and its softmax times V."""
    pairs = query[0] * query[1] * query[2] * key[2]
    return int(2 * pairs * (query[3] + value[3]))


def _attention_backward_flops(_gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Q K^T once more, dO V^T, and the gradients of Q, K and V."""
    pairs = query[0] * query[1] * query[2] * key[2]
    return int(2 * pairs * (3 * query[3] + 2 * value[3]))


def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of shapes [..., inputs] and [outputs, inputs]."""
    return int(2 * math.prod(x) * weight[0])


_ATEN: Any = torch.ops.aten
_CPU_FLOP_FORMULAS = {  # torch's table lacks attention on CPUs, and oneDNN
    torch.ops.mkldnn._linear_pointwise: _linear_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
