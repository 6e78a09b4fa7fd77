"""Which diffusion times are trained when: hooks that change the times of the objective during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import BlockMasking
from unmask.diffusion.time_sampling import ClippedTimes, UniformTimes
from unmask.objectives.base import MaskedObjective, Objective
from unmask.training._batches import BatchSource
from unmask.training.hooks import Hook
from unmask.training.loss import DenoisingLoss
from unmask.types import Batch

if TYPE_CHECKING:
    from unmask.training.trainer import Trainer

TIME_BINS = 20
"""Equal parts of the time; times can be clipped at their borders."""


@dataclass(frozen=True)
class TimeWidening:
    """Times from `low` to `high` at first, widening to all times at the share `end_fraction` of the run.

    With few tokens masked, each has visible neighbours to be guessed from; the true bound comes after.
    """

    low: float = 0.1
    """The smallest time at the start."""
    high: float = 0.4
    """The largest time at the start."""
    end_fraction: float = 0.6
    """The share of the run after which all times are trained."""

    def __post_init__(self) -> None:
        ClippedTimes(self.low, self.high)
        if not 0 < self.end_fraction <= 1:
            raise ValueError(f"end_fraction is a share of the run, above 0 and at most 1; got {self.end_fraction}")

    def times_at(self, progress: float) -> ClippedTimes | None:
        """The times that are trained at this share of the run; None: those of the objective."""
        if progress >= self.end_fraction:
            return None
        done = progress / self.end_fraction
        return ClippedTimes(self.low * (1 - done), self.high + (1 - self.high) * done)

    def build_hook(self, objective: Objective, batches: BatchSource) -> Hook:
        """The curriculum of a run with this objective."""
        return _TimeWideningHook(self, require_masked(objective))


class _TimeWideningHook(Hook):
    def __init__(self, curriculum: TimeWidening, objective: MaskedObjective) -> None:
        self.curriculum, self.objective = curriculum, objective

    def before_step(self, trainer: Trainer) -> None:
        times = self.curriculum.times_at(trainer.progress) or self.objective.times
        trainer.loss_fn = DenoisingLoss(replace(self.objective, times=times))


@dataclass(frozen=True)
class VarianceClipping:
    """The interval of times at which losses vary least, measured again and again during training.

    With few tokens masked a block's loss is all noise, with all masked there is little to learn from (block
    diffusion's clipped schedules). The reported bound is still that of all times.
    """

    every: int = 250
    """Steps between two measurements."""
    batches: int = 4
    """Global batches of a measurement."""
    min_width: float = 0.5
    """The least width of the interval."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.batches < 1:
            raise ValueError(f"every and batches must be at least 1; got {self.every} and {self.batches}")
        if not 1 / TIME_BINS <= self.min_width <= 1:
            raise ValueError(f"min_width is a width from {1 / TIME_BINS} to 1; got {self.min_width}")

    def choose_times(self, moments: Tensor) -> ClippedTimes:
        """The interval of least variance, from `loss_moments` [3, TIME_BINS]; the wider one of equals."""
        sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), moments.double().cumsum(1)], 1)
        best, least = ClippedTimes(), torch.inf
        for width in range(TIME_BINS, round(self.min_width * TIME_BINS) - 1, -1):
            for first in range(TIME_BINS - width + 1):
                count, total, squares = (sums[:, first + width] - sums[:, first]).tolist()
                variance = squares / count - (total / count) ** 2 if count > 1 else torch.inf
                if variance < least:
                    best, least = ClippedTimes(first / TIME_BINS, (first + width) / TIME_BINS), variance
        return best

    def build_hook(self, objective: Objective, batches: BatchSource) -> Hook:
        """The curriculum of a run with this objective; it measures on `batches`."""
        return _VarianceClippingHook(self, require_masked(objective), batches)


class _VarianceClippingHook(Hook):
    def __init__(self, curriculum: VarianceClipping, objective: MaskedObjective, batches: BatchSource) -> None:
        self.curriculum, self.objective, self.batches = curriculum, objective, batches
        self.times = ClippedTimes()

    def before_step(self, trainer: Trainer) -> None:
        if trainer.state.step % self.curriculum.every == 0:
            self.times = self._measure(trainer)
        trainer.loss_fn = DenoisingLoss(replace(self.objective, times=self.times))

    def state_dict(self) -> dict[str, Any]:
        return {"low": self.times.low, "high": self.times.high}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = ClippedTimes(state["low"], state["high"])

    @torch.no_grad()
    def _measure(self, trainer: Trainer) -> ClippedTimes:
        """The times at which the losses of all ranks vary least, on the batches of the next steps."""
        moments = torch.zeros(3, TIME_BINS, dtype=torch.float64)
        step, batch_size = trainer.state.step, trainer.config.batch_size
        trainer.model.eval()
        for later in range(step, step + self.curriculum.batches):
            for first, count in trainer.microbatch_splits:
                batch = self.batches.batch(later, min(first, batch_size - 1), max(1, count))
                generator = trainer.generator(later, 2)
                local = loss_moments(self.objective, trainer.parallel_model, batch.to(trainer.device), generator)
                moments += local.cpu() if count else 0
        trainer.model.train()
        return self.curriculum.choose_times(trainer.distributed.all_reduce(moments))


AnyCurriculum: TypeAlias = TimeWidening | VarianceClipping


def loss_moments(
    objective: MaskedObjective, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator
) -> Tensor:
    """For each bin of the time: the number of draws, the sum of their losses, and of their squares [3, TIME_BINS].

    A draw is that of a block, or of a row where text has no blocks; its loss is in nats per token.
    """
    nats, level = replace(objective, times=UniformTimes()).nll_and_level(denoiser, batch, generator)
    length = nats.shape[1]
    process = objective.process
    block = process.block_size if isinstance(process, BlockMasking) else length
    number = (torch.arange(length, device=nats.device) // block).expand_as(nats)
    blocks = -(-length // block)

    def by_block(values: Tensor) -> Tensor:
        return values.new_zeros(len(nats), blocks).scatter_add(1, number, values)

    counted = by_block(batch.loss_mask.double())
    loss = by_block(nats.double()) / counted.clamp(min=1)
    time_bin = (level.t.expand_as(nats)[:, ::block] * TIME_BINS).long().clamp(max=TIME_BINS - 1)
    not_empty = counted > 0
    moments = torch.stack([torch.ones_like(loss), loss, loss.square()])
    sums = torch.zeros(3, TIME_BINS, dtype=torch.float64, device=nats.device)
    return sums.index_add(1, time_bin[not_empty], moments[:, not_empty])


def require_masked(objective: Objective) -> MaskedObjective:
    """Refuse objectives without times to choose."""
    if not isinstance(objective, MaskedObjective):
        raise ValueError(f"a curriculum of times is for masked diffusion, not {type(objective).__name__}")
    return objective
