"""What a report measures with the model itself: the held-out bound, and the bound of T-step samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unmask.data.corpus import Corpus
from unmask.data.loader import Layout, Loader
from unmask.diffusion.denoise import Around, Denoise
from unmask.evaluation.likelihood import score_rows
from unmask.model import LanguageModel
from unmask.objectives import MDLM, SEDD, AnyObjective, Autoregression, UniformDiffusion
from unmask.types import Each, LogX, Rows, Times, Tokens

HELD_OUT = "valid"

ENDLESS = 1 << 20
"""Steps that stand for infinitely many: their bound is about a millionth of a nat higher. Drawn like those of
fewer steps it has their luck, so that a difference is not one of two lucks."""


@dataclass(frozen=True)
class Bound:
    """Nats per token of a T-step sampler, None being the limit of infinitely many."""

    steps: int | None
    nats_per_token: float
    standard_error: float
    perplexity: float
    perplexity_error: float


def no_step_bounds(objective: AnyObjective) -> str | None:
    """Why there is no bound for a T-step sampler, if there is none."""
    if isinstance(objective, Autoregression):
        return (
            "An autoregressive model writes one token after the other: its likelihood is exact,"
            " and there is no number of steps to choose."
        )
    if isinstance(objective, SEDD):
        return (
            "SEDD learns the rates of a process in continuous time; its loss bounds the likelihood of that"
            " process only, so a bound for T steps is not defined."
        )
    return None


def step_bounds(
    lm: LanguageModel,
    corpus: Corpus,
    layout: Layout,
    steps: tuple[int, ...],
    rows: int,
    replicates: int,
    seed: int,
    report: Callable[[int], None] | None = None,
) -> tuple[Bound, ...]:
    """The bound for every T of `steps`, and the limit if the objective has one: same text, same draws.

    `report` is told how many there are so far.
    """
    if no_step_bounds(lm.objective) is not None:
        return ()
    text = corpus.splits[HELD_OUT]
    loader = Loader(text, layout, batch_size=rows)

    def bound(T: int | None, less: float) -> Bound:  # noqa: N803
        objective = _in_steps(lm.objective, T)
        score = score_rows(Discount(lm.denoise, less), objective, loader, None, rows, replicates, seed)
        return _bound(T, score.nats_per_token + less, score.standard_error)

    limit: tuple[int | None, ...] = () if isinstance(lm.objective, UniformDiffusion) else (None,)
    with lm.inference():
        less = bound(1, 0.0).nats_per_token if _weighs_one(lm.objective) else 0.0
        found: list[Bound] = []
        for T in (*steps, *limit):  # noqa: N806
            found.append(bound(T, less))
            if report is not None:
                report(len(found))
        return tuple(found)


class Discount(Around):
    """log_x + c: every masked token costs c nats less, and the bound c nats per token.

    A token's weights in MDLM's loss are one on average, and their scatter is most of the noise: of nats
    that are about zero it leaves little. With a c that no draw decides, what is added back is exact.
    """

    def __init__(self, denoise: Denoise, nats: float) -> None:
        super().__init__(denoise)
        self.nats = nats

    def __call__(
        self, z: Tokens, t: Times, rows: Rows, *, each: Each | None = None, **context: Any
    ) -> Tensor:
        def cheaper(log_x: LogX, part: slice | Tensor) -> Tensor:
            return log_x + self.nats if each is None else each(log_x + self.nats, part)

        if each is None:
            return cheaper(self.denoise(z, t, rows, **context), slice(None))
        return self.denoise(z, t, rows, each=cheaper, **context)


def _weighs_one(objective: AnyObjective) -> bool:
    """Whether the loss is a weighted mean of -log_x[x] and nothing else."""
    return isinstance(objective, MDLM) and objective.zero_masking and objective.carry_over


def _in_steps(objective: AnyObjective, steps: int | None) -> AnyObjective:
    """The T-step version of an objective, for the same weights."""
    if isinstance(objective, MDLM):
        return replace(objective, steps=steps or ENDLESS, exact_counts=False)  # which are for continuous time
    if isinstance(objective, UniformDiffusion) and steps is not None:
        return replace(objective, steps=steps)
    raise ValueError(f"{type(objective).__name__} has no version in {steps} steps")


def _bound(steps: int | None, nats: float, error: float) -> Bound:
    perplexity = math.exp(min(700.0, nats))
    return Bound(steps, nats, error, perplexity, perplexity * error)
