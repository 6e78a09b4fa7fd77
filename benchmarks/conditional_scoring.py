"""Conditional scoring: many short requests in one call, against one call for each.

    python -m benchmarks.conditional_scoring [REQUESTS]     # 1,000 if not given

Prompts of 4 to 31 tokens with continuations of 1 to 8, as in multiple choice; 16 draws each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from unmask import MDLM, BlockDiffusion, DiTConfig, LanguageModel, NextToken, Tokenizer
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.objectives import Objective

REQUESTS, DRAWS = 1000, 16
OBJECTIVES: tuple[Objective, ...] = (MDLM(), BlockDiffusion(block_size=8), NextToken())


def make_requests(count: int) -> list[ScoreRequest]:
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        result: list[int] = torch.randint(256, (length,), generator=generator).tolist()
        return result

    return [ScoreRequest(ids(1, 9), ids(4, 32)) for _ in range(count)]


def make_model(objective: Objective) -> LanguageModel:
    torch.manual_seed(0)
    causal = objective.process.is_left_to_right
    backbone = DiTConfig(width=128, depth=4, heads=2, max_length=64, causal=causal)
    return LanguageModel.from_config(backbone, objective, Tokenizer.bytes())


def main(count: int = REQUESTS, alone: int = 50) -> None:
    """Print requests per second both ways; of the slow way, `alone` requests are timed."""
    requests, config = make_requests(count), ScoreConfig(DRAWS)
    for objective in OBJECTIVES:
        lm = make_model(objective)

        def score(part: list[ScoreRequest], lm: LanguageModel = lm) -> list[float]:
            with lm.inference_mode():
                return [each.nats for each in score_requests(lm.denoiser, lm.objective, part, config).per_text]

        score(requests[:20])  # warm up
        together, fast = _timed(lambda: score(requests))
        one_by_one, slow = _timed(lambda: [nats for request in requests[:alone] for nats in score([request])])
        # The first request has stream 0 of the seed in both ways; the others draw other noise alone.
        assert abs(together[0] - one_by_one[0]) < 1e-4 * abs(one_by_one[0])
        speeds = count / fast, len(one_by_one) / slow
        print(
            f"{type(objective).__name__}: {speeds[0]:,.0f} requests/s together, {speeds[1]:,.0f} one by one:"
            f" {speeds[0] / speeds[1]:.1f} times as fast"
        )


def _timed(work: Callable[[], list[float]]) -> tuple[list[float], float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
