"""Tokens per second and model FLOPs utilization of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unmask.distributed import Distributed
from unmask.hardware.flops import peak_flops


class ThroughputMeter:
    """Tokens per second, and model FLOPs utilization (FLOP/s as a share of the machine's peak), since the last call.

    Only the time inside steps counts. All ranks measure the peak at the same time, as they also compute at the
    same time, and their peaks and FLOPs are summed: ranks on one machine share it.
    """

    def __init__(self, distributed: Distributed, bf16: bool, tokens: int, flops: float) -> None:
        self.seconds, self.tokens, self.flops = 0.0, tokens, flops
        distributed.barrier()
        (self.peak_flops,) = distributed.all_reduce_scalars(
            peak_flops(torch.bfloat16 if bf16 else torch.float32, distributed.device)
        )

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Around a step."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def metrics(self, tokens: int, flops: float) -> dict[str, float]:
        """Metrics to log, given the totals of the run; the next interval starts here."""
        metrics = {
            "tokens_per_second": (tokens - self.tokens) / self.seconds,
            "mfu": (flops - self.flops) / self.seconds / self.peak_flops,
        }
        self.seconds, self.tokens, self.flops = 0.0, tokens, flops
        return metrics
