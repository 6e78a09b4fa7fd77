"""lm-evaluation-harness: what a thousand requests cost beside the network's own time.

    python -m benchmarks.harness [REQUESTS] [DRAWS]     # 1,000 requests of 128 draws if not given

Contexts of 20 to 60 tokens with targets of 1 to 16, as in multiple choice. The network's own time is that inside its
calls; what is more is encoding, noise, sums and the greedy flag.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lm_eval.api.instance import Instance

from unmask import MDLM, DiTConfig, LanguageModel, NextToken, Tokenizer
from unmask.evaluation.harness import HarnessModel
from unmask.model import Denoiser
from unmask.objectives import Objective

REQUESTS, DRAWS = 1000, 128


def make_requests(count: int) -> list[Instance]:
    generator = torch.Generator().manual_seed(0)

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (), generator=generator))
        return bytes(torch.randint(97, 123, (length,), generator=generator).tolist()).decode()

    pairs = [(text(20, 61), text(1, 17)) for _ in range(count)]
    return [Instance("loglikelihood", {}, pair, 0, ("benchmark", number, 1)) for number, pair in enumerate(pairs)]


def make_model(objective: Objective) -> LanguageModel:
    torch.manual_seed(0)
    causal = objective.process.is_left_to_right
    backbone = DiTConfig(width=128, depth=4, heads=2, max_length=128, dropout=0.0, causal=causal)
    return LanguageModel.from_config(backbone, objective, Tokenizer.bytes())


class NetworkClock:
    """Seconds inside calls of the network."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def main(count: int = REQUESTS, draws: int = DRAWS) -> None:
    """Print the ratio of all time to the network's, of masked diffusion and of an autoregressive model."""
    requests, clock, call = make_requests(count), NetworkClock(), Denoiser.__call__
    for objective in (MDLM(), NextToken()):
        model = HarnessModel(make_model(objective), mc_num=draws)
        model.loglikelihood(requests[:20])  # warm up
        Denoiser.__call__ = clock.wrap(call)  # type: ignore[method-assign]
        clock.seconds, start = 0.0, time.perf_counter()
        model.loglikelihood(requests)
        total, network = time.perf_counter() - start, clock.seconds
        Denoiser.__call__ = call  # type: ignore[method-assign]
        print(
            f"{type(objective).__name__}: {count:,} requests of {draws} draws in {total:.1f} s,"
            f" {total / network:.3f} times the network's own {network:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
