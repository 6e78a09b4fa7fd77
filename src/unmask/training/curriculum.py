"""Which times are learned when: an objective that changes with the progress of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import BlockMasking
from unmask.diffusion.time_sampling import ClippedTimes, UniformTimes
from unmask.objectives.base import MaskedObjective, Objective
from unmask.types import Batch

TIME_BINS = 20
"""Equal parts of the time, whose borders are those that times can be clipped at."""

_ObjectiveT = TypeVar("_ObjectiveT", bound=Objective)


@dataclass(frozen=True)
class TimeWidening:
    """Times from `low` to `high` at first, widening to all of them at the share `until` of the run.

    With few tokens hidden, each has visible neighbours to be guessed from; the true bound comes after.
    """

    low: float = 0.1
    high: float = 0.4
    end_fraction: float = 0.6

    def __post_init__(self) -> None:
        ClippedTimes(self.low, self.high)
        if not 0 < self.end_fraction <= 1:
            raise ValueError(f"end_fraction is a share of the run, above 0 and at most 1; got {self.end_fraction}")

    def needs_measurement(self, step: int) -> bool:
        """Whether something is to be measured before this step."""
        return False

    def objective_at(self, objective: _ObjectiveT, progress: float, _measured: ClippedTimes) -> _ObjectiveT:
        """The objective at this share of the run."""
        _require_masked(objective)
        if progress >= self.end_fraction:
            return objective
        done = progress / self.end_fraction
        times = ClippedTimes(self.low * (1 - done), self.high + (1 - self.high) * done)
        return replace(objective, times=times)  # type: ignore[type-var]


@dataclass(frozen=True)
class VarianceClipping:
    """The part of the times at which losses vary least, measured every so many steps on so many batches.

    With few tokens hidden a block's loss is all noise, with all hidden there is little to learn from (block
    diffusion's clipped schedules). The part has at least the width `narrowest`. What is reported as a bound
    is still that of all times.
    """

    every: int = 250
    batches: int = 4
    min_width: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or self.batches < 1:
            raise ValueError(f"every and batches must be at least 1; got {self.every} and {self.batches}")
        if not 1 / TIME_BINS <= self.min_width <= 1:
            raise ValueError(f"min_width is a width from {1 / TIME_BINS} to 1; got {self.min_width}")

    def needs_measurement(self, step: int) -> bool:
        """Whether the times are to be chosen anew before this step."""
        return step % self.every == 0

    def objective_at(self, objective: _ObjectiveT, _progress: float, measured: ClippedTimes) -> _ObjectiveT:
        """The objective on the part of the times that was measured last."""
        _require_masked(objective)
        return replace(objective, times=measured)  # type: ignore[type-var]

    def choose_times(self, moments: Tensor) -> ClippedTimes:
        """The steadiest part, from `loss_moments` [3, CELLS]; the wider one of equals."""
        sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), moments.double().cumsum(1)], 1)
        best, least = ClippedTimes(), torch.inf
        for width in range(TIME_BINS, round(self.min_width * TIME_BINS) - 1, -1):
            for first in range(TIME_BINS - width + 1):
                count, total, squares = (sums[:, first + width] - sums[:, first]).tolist()
                variance = squares / count - (total / count) ** 2 if count > 1 else torch.inf
                if variance < least:
                    best, least = ClippedTimes(first / TIME_BINS, (first + width) / TIME_BINS), variance
        return best


AnyCurriculum: TypeAlias = TimeWidening | VarianceClipping


def loss_moments(objective: Objective, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
    """How many draws fell into each cell of the time, the sum of their losses, and of their squares: [3,
    CELLS].

    A draw is that of a block, or of a row where text has no blocks; its loss is in nats per token.
    """
    masked = _require_masked(objective)
    nats, t = replace(masked, times=UniformTimes()).nll_and_time(denoiser, batch, generator)
    length = nats.shape[1]
    process = masked.process
    block = process.block_size if isinstance(process, BlockMasking) else length
    number = (torch.arange(length, device=nats.device) // block).expand_as(nats)
    blocks = -(-length // block)

    def by_block(values: Tensor) -> Tensor:
        return values.new_zeros(len(nats), blocks).scatter_add(1, number, values)

    counted = by_block(batch.loss_mask.double())
    loss = by_block(nats.double()) / counted.clamp(min=1)
    cell = (t.expand_as(nats)[:, ::block] * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    some = counted > 0
    moments = torch.stack([torch.ones_like(loss), loss, loss.square()])
    sums = torch.zeros(3, TIME_BINS, dtype=torch.float64, device=nats.device)
    return sums.index_add(1, cell[some], moments[:, some])


def _require_masked(objective: Objective) -> MaskedObjective:
    if not isinstance(objective, MaskedObjective):
        raise ValueError(f"a curriculum of times is for masked diffusion, not {type(objective).__name__}")
    return objective
