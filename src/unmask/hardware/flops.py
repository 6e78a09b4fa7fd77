"""What the machine can do and what a run asks of it: peak speed, FLOPs, compilation, memory."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unmask.distributed import Distributed

_MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Sides of the square matrices that the peak is looked for with, as far as the time suffices."""


def bf16_is_faster(device: torch.device, seconds: float = 0.8, rounds: int = 4) -> bool:
    """Whether matrix products in bfloat16 are at least half again as fast as in float32, measured.

    They take turns: a moment in which something else computes must not decide.
    """
    if device.type == "cuda":
        return True
    best = dict.fromkeys((torch.bfloat16, torch.float32), 0.0)
    for _ in range(rounds):
        for dtype in best:
            best[dtype] = max(best[dtype], measure_peak_flops(dtype, device, seconds / rounds / len(best)))
    return best[torch.bfloat16] > 1.5 * best[torch.float32]


def measure_peak_flops(dtype: torch.dtype, device: torch.device, seconds: float = 0.4) -> float:
    """FLOP/s of the fastest of many square matrix products, by all threads of this process.

    The first ones are slow (threads start, others may be computing), so all sizes have their turns until
    `seconds` are over; a size waits while one product of it would take longer than what is left.
    """
    # A generator of its own: looking at the machine must not change a run's random numbers.
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


def _time_matmul(a: torch.Tensor) -> float:
    _synchronize(a.device)
    started = time.perf_counter()
    a @ a
    _synchronize(a.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ThroughputMeter:
    """Speed since the last look: tokens a second, and FLOPs a second as a share of the machine's peak.

    Only the time inside steps counts. All ranks measure the peak at the same time, as they also work at
    the same time, and their peaks and FLOPs are summed: ranks on one machine share it.
    """

    def __init__(self, distributed: Distributed, bf16: bool, tokens: int, flops: float) -> None:
        self.seconds, self.tokens, self.flops = 0.0, tokens, flops
        distributed.barrier()
        (self.peak_flops,) = distributed.all_reduce_scalars(
            measure_peak_flops(torch.bfloat16 if bf16 else torch.float32, distributed.device)
        )

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Around a step."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def metrics(self, tokens: int, flops: float) -> dict[str, float]:
        """What there is to log, given the totals of the run; the next look starts from here."""
        figures = {
            "tokens_per_second": (tokens - self.tokens) / self.seconds,
            "mfu": (flops - self.flops) / self.seconds / self.peak_flops,
        }
        self.seconds, self.tokens, self.flops = 0.0, tokens, flops
        return figures


@dataclass
class FlopCount:
    """FLOPs of the matrix products in a `counting` block, once it has ended."""

    flops: int = 0


@contextmanager
def count_flops(enabled: bool) -> Iterator[FlopCount]:
    """Count the FLOPs of matrix products, attention's too; nothing happens unless `wanted`.

    Compiled code cannot be looked into, so it is not used meanwhile: a counted step is an eager one.
    """
    count = FlopCount()
    if not enabled:
        yield count
        return
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_FLOP_FORMULAS)
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    # Without the stance, the compiler would meet the counter once and then leave the code alone for ever.
    with torch.compiler.set_stance("force_eager"), counter:
        yield count
    count.flops = counter.get_total_flops()


class _NoModuleTracker:
    """In place of the counter's own list of modules, which keeps their inputs alive until the end."""

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
_CPU_FLOP_FORMULAS = {  # torch's own table knows attention on other devices only, and nothing of oneDNN
    torch.ops.mkldnn._linear_pointwise: _linear_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def retain_freed_memory() -> None:
    """Leave memory that is freed with this process, as far as its C library (glibc) can be told to, unless
    the environment tells it something else.

    By default large blocks go back to the system and come again as fresh pages, which must be zeroed: with
    50,000 tokens and bfloat16, a tenth of every step.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with suppress(OSError, AttributeError, TypeError):  # other libraries, other systems
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold, largest = -1, -3, 2**31 - 1
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, largest)


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of the network, in place: names of parameters stay as they are.

    The blocks share one graph (and another for batches with padding), whatever the batch and the length:
    which code a step runs does not depend on the steps before it, so that a resumed run is bit-identical
    here, too. The last block, whose shapes follow the masks, is left alone: it would be compiled again at
    every step.
    """
    compiler = os.environ.get("CXX")
    known = [compiler] if compiler else ["g++", "clang++", "c++", "cl"]
    if not any(shutil.which(name) for name in known):
        raise ValueError(
            f"compile needs a C++ compiler, and there is no {' or '.join(known)} here:"
            " install one, name yours in the variable CXX, or train without compile"
        )
    blocks = [module for module in model.modules() if type(module).__name__ == "Block"]
    if not blocks:
        raise ValueError("compile is for networks made of blocks, and this one has none: train without it")
    for block in blocks[:-1]:
        block.compile(dynamic=True)


class OutOfMemoryError(RuntimeError):
    """There was not enough memory for a step."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch on a CPU has no class of its own for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error)
    signs = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError | OSError) and any(sign in told for sign in signs)


def oom_advice(microbatch_size: int) -> str:
    """What to do when `rows` at once are too many."""
    if microbatch_size <= 1:
        return "one row at once was too much, so take a smaller network or shorter rows"
    return (
        f"{microbatch_size} rows at once were too many, so try microbatch_size={microbatch_size // 2},"
        " which means the same"
    )
