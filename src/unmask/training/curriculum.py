"""Which times are learned when: an objective that changes with the progress of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import BlockMasking
from unmask.diffusion.times import PartTimes, UniformTimes
from unmask.objectives.base import MaskedObjective, Objective
from unmask.types import Batch

CELLS = 20
"""Equal parts of the time, whose borders are those that times can be clipped at."""

AnyKind = TypeVar("AnyKind", bound=Objective)


@dataclass(frozen=True)
class Widening:
    """Times from `low` to `high` at first, widening to all of them at the share `until` of the run.

    With few tokens hidden, each has visible neighbours to be guessed from; the true bound comes after.
    """

    low: float = 0.1
    high: float = 0.4
    until: float = 0.6

    def __post_init__(self) -> None:
        PartTimes(self.low, self.high)
        if not 0 < self.until <= 1:
            raise ValueError(f"until is a share of the run, above 0 and at most 1; got {self.until}")

    def due(self, step: int) -> bool:
        """Whether something is to be measured before this step."""
        return False

    def applied(self, objective: AnyKind, progress: float, _measured: PartTimes) -> AnyKind:
        """The objective at this share of the run."""
        _check(objective)
        if progress >= self.until:
            return objective
        done = progress / self.until
        times = PartTimes(self.low * (1 - done), self.high + (1 - self.high) * done)
        return replace(objective, times=times)  # type: ignore[type-var]


@dataclass(frozen=True)
class Clipping:
    """The part of the times at which losses vary least, measured every so many steps on so many batches.

    With few tokens hidden a block's loss is all noise, with all hidden there is little to learn from (block
    diffusion's clipped schedules). The part has at least the width `narrowest`. What is reported as a bound
    is still that of all times.
    """

    every: int = 250
    batches: int = 4
    narrowest: float = 0.5

    def __post_init__(self) -> None:
        if self.every < 1 or self.batches < 1:
            raise ValueError(f"every and batches must be at least 1; got {self.every} and {self.batches}")
        if not 1 / CELLS <= self.narrowest <= 1:
            raise ValueError(f"narrowest is a width from {1 / CELLS} to 1; got {self.narrowest}")

    def due(self, step: int) -> bool:
        """Whether the times are to be chosen anew before this step."""
        return step % self.every == 0

    def applied(self, objective: AnyKind, _progress: float, measured: PartTimes) -> AnyKind:
        """The objective on the part of the times that was measured last."""
        _check(objective)
        return replace(objective, times=measured)  # type: ignore[type-var]

    def chosen(self, moments: Tensor) -> PartTimes:
        """The steadiest part, from `loss_moments` [3, CELLS]; the wider one of equals."""
        sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), moments.double().cumsum(1)], 1)
        best, least = PartTimes(), torch.inf
        for width in range(CELLS, round(self.narrowest * CELLS) - 1, -1):
            for first in range(CELLS - width + 1):
                count, total, squares = (sums[:, first + width] - sums[:, first]).tolist()
                variance = squares / count - (total / count) ** 2 if count > 1 else torch.inf
                if variance < least:
                    best, least = PartTimes(first / CELLS, (first + width) / CELLS), variance
        return best


AnyCurriculum: TypeAlias = Widening | Clipping


def loss_moments(objective: Objective, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
    """How many draws fell into each cell of the time, the sum of their losses, and of their squares: [3,
    CELLS].

    A draw is that of a block, or of a row where text has no blocks; its loss is in nats per token.
    """
    masked = _check(objective)
    nats, t = replace(masked, times=UniformTimes()).timed_nll(denoise, batch, generator)
    length = nats.shape[1]
    process = masked.process
    block = process.block if isinstance(process, BlockMasking) else length
    number = (torch.arange(length, device=nats.device) // block).expand_as(nats)
    blocks = -(-length // block)

    def by_block(values: Tensor) -> Tensor:
        return values.new_zeros(len(nats), blocks).scatter_add(1, number, values)

    counted = by_block(batch.counted.double())
    loss = by_block(nats.double()) / counted.clamp(min=1)
    cell = (t.expand_as(nats)[:, ::block] * CELLS).long().clamp(max=CELLS - 1)
    some = counted > 0
    moments = torch.stack([torch.ones_like(loss), loss, loss.square()])
    sums = torch.zeros(3, CELLS, dtype=torch.float64, device=nats.device)
    return sums.index_add(1, cell[some], moments[:, some])


def _check(objective: Objective) -> MaskedObjective:
    if not isinstance(objective, MaskedObjective):
        raise ValueError(f"a curriculum of times is for masked diffusion, not {type(objective).__name__}")
    return objective
