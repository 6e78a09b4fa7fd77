"""What a trainer reads: batches by step, prepared ahead of time in a background thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from unmask.types import Vocab


class BatchLike(Protocol):
    """Some rows of a global batch. With a method `pin_memory`, it is copied to a GPU asynchronously."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def to(self, device: torch.device) -> Any:
        """The same rows on another device."""
        ...


class BatchSource(Protocol):
    """The global batches of a run, by random access.

    A batch is a function of its arguments, so that a resumed run sees what an uninterrupted one would, and any
    split over ranks and micro-batches sees the same rows.
    """

    def batch(self, step: int, row_offset: int, count: int) -> Any:
        """Rows row_offset, ..., row_offset + count - 1 of the global batch of `step`: a `BatchLike`."""
        ...


@dataclass(frozen=True)
class RandomLength:
    """The batches of `source`, those of a random share of the steps truncated to a random length."""

    source: BatchSource
    probability: float
    seed: int

    def batch(self, step: int, row_offset: int, count: int) -> Any:
        batch = self.source.batch(step, row_offset, count)
        random = np.random.default_rng([self.seed, step])
        if random.random() >= self.probability:
            return batch
        return batch.truncated(int(random.integers(1, batch.tokens.shape[1] + 1)))


@dataclass(frozen=True)
class CheckedBatches:
    """The batches of `source`; ids outside the vocabulary, and mask ids, are refused before they reach the device."""

    source: BatchSource
    vocab: Vocab

    def batch(self, step: int, row_offset: int, count: int) -> Any:
        return self.source.batch(step, row_offset, count).checked(self.vocab)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and whether its rows count.

    Every rank must enter the collectives of every micro-batch, so a rank without rows of its own gets one row
    of another rank, which does not count.
    """

    batch: Any
    counts: bool


class Prefetcher:
    """A rank's micro-batches of each step; those of the next step are read in a background thread.

    An error in the thread is raised by the call that asks for the step.
    """

    def __init__(
        self,
        batches: BatchSource,
        batch_size: int,
        splits: Sequence[tuple[int, int]],
        steps: int,
        device: torch.device,
    ) -> None:
        self.batches, self.batch_size, self.splits = batches, batch_size, splits
        self.steps, self.device = steps, device
        self._pending: dict[int, Future[list[MicroBatch]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unmask-batches")

    def microbatches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of a step, on the device."""
        current = self._pending.pop(step, None) or self._thread.submit(self._read, step)
        following = self._pending.get(step + 1)
        self._pending = {}
        if step + 1 < self.steps:
            self._pending[step + 1] = following or self._thread.submit(self._read, step + 1)
        for micro in current.result():
            yield MicroBatch(self._on_device(micro.batch), micro.counts)

    def _read(self, step: int) -> list[MicroBatch]:
        micro: list[MicroBatch] = []
        for first, count in self.splits:
            batch = self.batches.batch(step, min(first, self.batch_size - 1), max(1, count))
            if len(batch) != max(1, count):
                raise ValueError(f"batch({step}, {first}, {count}) must have {count} rows; got {len(batch)}")
            if self.device.type == "cuda" and hasattr(batch, "pin_memory"):
                batch = batch.pin_memory()
            micro.append(MicroBatch(batch, count > 0))
        return micro

    def _on_device(self, batch: Any) -> Any:
        if self.device.type == "cuda" and hasattr(batch, "pin_memory"):
            return batch.to(self.device, non_blocking=True)
        return batch.to(self.device)
