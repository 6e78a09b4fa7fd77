"""BatchSource come from a background thread: the same ones, errors included, and few values are read back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import training_worker as worker
from unmask.distributed import Distributed
from unmask.training._batches import CheckedBatches, Prefetcher, RandomLength
from unmask.types import Batch, Vocab

CPU = torch.device("cpu")


class Numbered:
    """Rows that say which step and row they are; remembers which thread read which step."""

    def __init__(self) -> None:
        self.read: list[tuple[int, str]] = []

    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        self.read.append((step, threading.current_thread().name))
        rows = torch.arange(row_offset, row_offset + count)[:, None]
        return Batch(1000 * step + rows, row_offset=row_offset, global_batch_size=8)


def tokens(prefetcher: Prefetcher, step: int) -> list[int]:
    return [int(row) for micro in prefetcher.microbatches(step) for row in micro.batch.tokens]


def test_the_next_step_is_read_ahead_in_a_thread_and_any_step_may_follow() -> None:
    source = Numbered()
    prefetcher = Prefetcher(source, 8, [(0, 2), (2, 2)], steps=6, device=CPU)
    for step in (0, 1, 2, 4, 1, 5):  # in order, and as after a resume
        assert tokens(prefetcher, step) == [1000 * step + row for row in range(4)]
    prefetcher._thread.shutdown()
    assert [step for step, _ in source.read[::2]] == [0, 1, 2, 3, 4, 5, 1, 2, 5]
    assert {name.rsplit("_")[0] for _, name in source.read} == {"unmask-batches"}
    assert max(step for step, _ in source.read) == 5, "nothing is read beyond the last step"


def test_an_error_in_the_thread_is_the_error_of_its_step() -> None:
    class Damaged(Numbered):
        def batch(self, step: int, row_offset: int, count: int) -> Batch:
            if step == 2:
                raise ValueError("train-00000.bin is damaged")
            return super().batch(step, row_offset, count)

    prefetcher = Prefetcher(Damaged(), 8, [(0, 8)], steps=9, device=CPU)
    assert tokens(prefetcher, 0)
    assert tokens(prefetcher, 1)
    with pytest.raises(ValueError, match=r"^train-00000\.bin is damaged$"):
        tokens(prefetcher, 2)
    assert tokens(prefetcher, 3)


def test_a_gpu_gets_pinned_batches_asynchronously() -> None:
    calls: list[Any] = []

    class Recorded:
        def __len__(self) -> int:
            return 8

        def pin_memory(self) -> Recorded:
            calls.append(("pin", threading.current_thread() is threading.main_thread()))
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> Recorded:
            calls.append(("to", str(device), non_blocking))
            return self

    class Source:
        def batch(self, step: int, row_offset: int, count: int) -> Recorded:
            return Recorded()

    list(Prefetcher(Source(), 8, [(0, 8)], steps=1, device=torch.device("cuda", 0)).microbatches(0))
    assert calls == [("pin", False), ("to", "cuda:0", True)]


def test_random_lengths_are_those_of_the_step_on_every_rank() -> None:
    source = worker.build_trainer(worker.TRAINING, 0.0, Distributed()).batches
    batches = RandomLength(source, 0.5, seed=3)
    lengths = [batches.batch(step, 0, 2).tokens.shape[1] for step in range(40)]
    assert lengths == [batches.batch(step, 4, 1).tokens.shape[1] for step in range(40)]
    assert 5 < sum(length < 16 for length in lengths) < 35
    shortened = lengths.index(min(lengths))
    whole = source.batch(shortened, 0, 2).tokens
    assert torch.equal(batches.batch(shortened, 0, 2).tokens, whole[:, : min(lengths)])


def test_bad_ids_are_refused_before_the_step_and_good_ones_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = worker.build_trainer(worker.TRAINING, 0.0, Distributed())
    batch = trainer.batches.batch(0, 0, 2)
    assert batch.checked_vocab == trainer.model.vocab
    checks: list[str] = []

    def noted(vocab: Vocab, ids: torch.Tensor, *, clean: bool = False) -> None:
        checks.extend([threading.current_thread().name] * clean)

    monkeypatch.setattr(Vocab, "validate", noted)
    trainer.step()
    assert checks
    assert all(name.startswith("unmask-batches") for name in checks)
    monkeypatch.undo()

    class Masked(Numbered):
        def batch(self, step: int, row_offset: int, count: int) -> Batch:
            return Batch(torch.full((count, 4), 6), row_offset=row_offset, global_batch_size=8)

    prefetcher = Prefetcher(CheckedBatches(Masked(), Vocab(7, 6)), 8, [(0, 8)], steps=9, device=CPU)
    with pytest.raises(ValueError, match="the data contains the mask id 6"):
        tokens(prefetcher, 0)
