"""Which precision is faster on this machine."""

from __future__ import annotations

from functools import cache

import torch

from unmask.hardware.flops import measure_peak_flops


@cache
def bf16_is_faster(device: torch.device, seconds: float = 0.8, rounds: int = 4) -> bool:
    """Whether matrix products in bfloat16 are at least 1.5 times as fast as in float32, measured.

    The two take turns, so that a moment in which another process computes does not decide. A process measures once.
    """
    if device.type == "cuda":
        return True
    best = dict.fromkeys((torch.bfloat16, torch.float32), 0.0)
    for _ in range(rounds):
        for dtype in best:
            best[dtype] = max(best[dtype], measure_peak_flops(dtype, device, seconds / rounds / len(best)))
    return best[torch.bfloat16] > 1.5 * best[torch.float32]
