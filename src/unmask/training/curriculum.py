"""What is learned first: an objective that changes with the progress of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from unmask.diffusion.times import PartTimes
from unmask.objectives.base import MaskedObjective, Objective

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

    def applied(self, objective: AnyKind, progress: float) -> AnyKind:
        """The objective at this share of the run."""
        if not isinstance(objective, MaskedObjective):
            raise ValueError(f"a curriculum of times is for masked diffusion, not {type(objective).__name__}")
        if progress >= self.until:
            return objective
        done = progress / self.until
        times = PartTimes(self.low * (1 - done), self.high + (1 - self.high) * done)
        return replace(objective, times=times)
