"""The bound for samplers of T steps: what fewer steps cost, on the same text and with the same draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unmask.data.loader import Loader
from unmask.diffusion.denoiser import DenoiserLike
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.objectives import Objective
from unmask.types import ProgressFn


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

    bounds: list[StepBound] = []
    for count in (*steps, None):
        discrete = objective.in_steps(count)
        if discrete is not None:
            score = score_corpus(denoiser, discrete, loader, config)
            nats, error = score.nats_per_token, score.standard_error
            perplexity = math.exp(min(700.0, nats))
            bounds.append(StepBound(count, nats, error, perplexity, perplexity * error))
            if progress is not None:
                progress(len(bounds))
    return tuple(bounds)
