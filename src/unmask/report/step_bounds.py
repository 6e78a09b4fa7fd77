"""What a report measures with the model itself: the held-out bound, and the bound of T-step samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from unmask.context import Context
from unmask.data.corpus import Corpus
from unmask.data.loader import Loader, RowLayout
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.model import LanguageModel
from unmask.objectives import MDLM, SEDD, NextToken, Objective, UniformDiffusion
from unmask.objectives.base import SteppedObjective
from unmask.types import LogX, Positions, RowFn, Times, Tokens

VALID_SPLIT = "valid"

_CONTINUOUS_STEPS = 1 << 20
"""Steps that stand for infinitely many: their bound is about a millionth of a nat higher. Drawn like those of
fewer steps it has their luck, so that a difference is not one of two lucks."""


@dataclass(frozen=True)
class StepBound:
    """Nats per token of a T-step sampler, None being the limit of infinitely many."""

    steps: int | None
    nats_per_token: float
    standard_error: float
    perplexity: float
    perplexity_error: float


def why_no_step_bounds(objective: Objective) -> str | None:
    """Why there is no bound for a T-step sampler, if there is none."""
    if isinstance(objective, NextToken):
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
    layout: RowLayout,
    steps: tuple[int, ...],
    windows: int,
    replicates: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[StepBound, ...]:
    """The bound for every T of `steps`, and the limit if the objective has one: same text, same draws.

    `report` is told how many there are so far.
    """
    if why_no_step_bounds(lm.objective) is not None:
        return ()
    text = corpus.splits[VALID_SPLIT]
    loader = Loader(text, layout, batch_size=windows)

    def bound(T: int | None, less: float) -> StepBound:  # noqa: N803
        objective = _discretize(lm.objective, T)
        config = EvalConfig(windows, replicates, seed=seed)
        score = score_corpus(_ShiftedDenoiser(lm.denoiser, less), objective, loader, config)
        return _step_bound(T, score.nats_per_token + less, score.standard_error)

    limit: tuple[int | None, ...] = () if isinstance(lm.objective, UniformDiffusion) else (None,)
    with lm.inference_mode():
        less = bound(1, 0.0).nats_per_token if _is_weighted_nll(lm.objective) else 0.0
        found: list[StepBound] = []
        for T in (*steps, *limit):  # noqa: N806
            found.append(bound(T, less))
            if progress is not None:
                progress(len(found))
        return tuple(found)


class _ShiftedDenoiser(DenoiserWrapper):
    """log_x + c: every masked token costs c nats less, and the bound c nats per token.

    A token's weights in MDLM's loss are one on average, and their scatter is most of the noise: of nats
    that are about zero it leaves little. With a c that no draw decides, what is added back is exact.
    """

    def __init__(self, denoiser: DenoiserLike, offset: float) -> None:
        super().__init__(denoiser)
        self.offset = offset

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        def shifted(log_x: LogX, indices: slice | Tensor) -> Tensor:
            return log_x + self.offset if row_fn is None else row_fn(log_x + self.offset, indices)

        if row_fn is None:
            return shifted(self.denoiser(z, t, positions, context, sequence_ids=sequence_ids), slice(None))
        return self.denoiser(z, t, positions, context, row_fn=shifted, sequence_ids=sequence_ids)


def _is_weighted_nll(objective: Objective) -> bool:
    """Whether the loss is a weighted mean of -log_x[x] and nothing else."""
    return isinstance(objective, MDLM) and objective.carry_over


def _discretize(objective: Objective, steps: int | None) -> Objective:
    """The T-step version of an objective, for the same weights."""
    if isinstance(objective, SteppedObjective):
        return replace(
            objective, steps=steps or _CONTINUOUS_STEPS, exact_mask_counts=False
        )  # which are for continuous time
    if isinstance(objective, UniformDiffusion) and steps is not None:
        return replace(objective, steps=steps)
    raise ValueError(f"{type(objective).__name__} has no version in {steps} steps")


def _step_bound(steps: int | None, nats: float, error: float) -> StepBound:
    perplexity = math.exp(min(700.0, nats))
    return StepBound(steps, nats, error, perplexity, perplexity * error)
