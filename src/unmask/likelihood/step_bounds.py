"""The bound for samplers of T steps: what fewer steps cost, on the same text and with the same draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from unmask.context import Context
from unmask.data.loader import Loader
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.objectives import MDLM, Objective
from unmask.types import LogX, Positions, ProgressFn, RowFn, Times, Tokens


@dataclass(frozen=True)
class StepBound:
    """The bound for a sampler of `steps` steps; None is the limit of infinitely many."""

    steps: int | None
    nats_per_token: float
    standard_error: float
    perplexity: float
    perplexity_error: float


def why_no_step_bounds(objective: Objective) -> str | None:
    """The reason why an objective has no bound for samplers of T steps; None if it has one."""
    if objective.in_steps(1) is not None:
        return None
    if objective.process.is_left_to_right:
        return "An autoregressive model has no number of steps to choose: it writes one token at a time."
    return (
        f"The loss of {type(objective).__name__} is a bound in continuous time only, so there is no bound for T steps."
    )


def step_bounds(
    denoiser: DenoiserLike,
    objective: Objective,
    loader: Loader,
    steps: tuple[int, ...],
    config: EvalConfig,
    progress: ProgressFn | None = None,
) -> tuple[StepBound, ...]:
    """The bound for every T of `steps`, then the limit if the objective has one; `progress` counts the bounds.

    All of them draw the same times and noise, so that their differences have little noise.
    """

    def bound(discrete: Objective, steps: int | None, offset: float) -> StepBound:
        score = score_corpus(_ShiftedDenoiser(denoiser, offset), discrete, loader, config)
        nats = score.nats_per_token + offset
        perplexity = math.exp(min(700.0, nats))
        return StepBound(steps, nats, score.standard_error, perplexity, perplexity * score.standard_error)

    single_step = objective.in_steps(1)
    if single_step is None:
        return ()
    offset = bound(single_step, 1, 0.0).nats_per_token if _is_weighted_nll(objective.bound) else 0.0
    bounds: list[StepBound] = []
    for count in (*steps, None):
        discrete = objective.in_steps(count)
        if discrete is not None:
            bounds.append(bound(discrete, count, offset))
            if progress is not None:
                progress(len(bounds))
    return tuple(bounds)


class _ShiftedDenoiser(DenoiserWrapper):
    """log_x + c, which lowers a loss sum of weight * -log_x[x] by c nats per token on average.

    The weights of MDLM's loss are one on average, and most of the variance of T-step bounds is theirs. With
    nats shifted to about zero little of it is left, and adding c back is exact, as c does not depend on a draw.
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

        return self.denoiser(z, t, positions, context, row_fn=shifted, sequence_ids=sequence_ids)


def _is_weighted_nll(objective: Objective) -> bool:
    """Whether the loss is a weighted sum of -log_x[x] and nothing else."""
    return isinstance(objective, MDLM) and objective.carry_over
