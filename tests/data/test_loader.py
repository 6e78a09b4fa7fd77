"""batch = f(seed, step): every row once an epoch, the same for any split of the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data.loader import ROW_LAYOUTS, Loader, PerDocument, RowLayout, Rows, Spans, TokenSource, Wrapped
from unmask.data.loader._shuffle import feistel_permutation
from unmask.types import Batch


class Stream:
    """Token i is i itself, so that a row says where it is from."""

    def __init__(self, *lengths: int) -> None:
        self.document_ends = np.cumsum(lengths)
        self.num_tokens = int(self.document_ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.num_tokens
        return np.arange(start, stop)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63))
def test_a_permutation_is_one(size: int, key: int) -> None:
    image = feistel_permutation(np.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))
    assert feistel_permutation(np.array([size // 2]), size, key)[0] == image[size // 2]


def test_permutations_differ_and_mix() -> None:
    images = [feistel_permutation(np.arange(1000), 1000, key) for key in range(20)]
    assert len({tuple(image.tolist()) for image in images}) == 20
    neighbours = np.mean([np.mean(np.abs(np.diff(image)) == 1) for image in images])
    assert neighbours < 0.01


@settings(max_examples=30)
@given(
    tokens=st.integers(8, 500),
    length=st.integers(1, 8),
    batch=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_an_epoch_has_every_window_once(tokens: int, length: int, batch: int, seed: int) -> None:
    loader = Loader(Stream(tokens), Wrapped(length), batch, seed)
    steps = -(-2 * loader.num_rows // batch)
    rows = torch.cat([loader.batch(step).tokens for step in range(steps)])[:, 0].tolist()
    for epoch in range(2):
        starts = sorted(rows[epoch * loader.num_rows : (epoch + 1) * loader.num_rows])
        assert len(set(starts)) == loader.num_rows
        assert all(b - a == length for a, b in itertools.pairwise(starts))
        assert starts[-1] + length <= tokens


@given(cuts=st.lists(st.integers(0, 12), max_size=4), step=st.integers(0, 50))
def test_any_split_of_a_batch_is_the_batch(cuts: list[int], step: int) -> None:
    loader = Loader(Stream(40, 37, 100), PerDocument(16), 12)
    edges = sorted({0, 12, *cuts})
    parts = [loader.batch(step, a, b - a) for a, b in itertools.pairwise(edges)]
    whole = loader.batch(step)
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert [part.row_offset for part in parts] == edges[:-1]
    assert all(part.resolved_global_batch_size == 12 for part in parts)


def test_documents_in_rows_of_their_own() -> None:
    loader = Loader(Stream(5, 1, 9), PerDocument(4), 6)
    batch = loader.sequential_batch(0, 6)
    assert batch.valid is not None
    rows = [t[v].tolist() for t, v in zip(batch.tokens, batch.valid, strict=True)]
    assert rows == [[0, 1, 2, 3], [4], [5], [6, 7, 8, 9], [10, 11, 12, 13], [14]]


def test_documents_apart_are_numbered() -> None:
    batch = Loader(Stream(5, 3, 8), Wrapped(8, isolate_documents=True), 1).sequential_batch(0, 1)
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]


def test_seeds_and_epochs_shuffle_differently() -> None:
    first, other = (Loader(Stream(4000), Wrapped(4), 100, seed).batch(0).tokens for seed in (0, 1))
    assert not torch.equal(first, other)


def test_a_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens is shorter than one window of 8"):
        Loader(Stream(7), Wrapped(8), 1)


def test_some_rows_lie_evenly_over_the_text() -> None:
    loader = Loader(Stream(205), Wrapped(10), batch_size=4)
    total = loader.num_sequential_rows
    all_rows = [loader.sequential_batch(i, 1).tokens[0].tolist() for i in range(total)]
    some = [row for first in (0, 4) for row in loader.sequential_batch(first, 4, num_windows=7).tokens.tolist()]
    assert some == [all_rows[i * total // 7] for i in range(7)]
    assert loader.sequential_batch(0, total, num_windows=total).tokens.tolist() == all_rows


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """A batch of a task that a later version may have."""

    labels: torch.Tensor | None = None


class DocumentStarts(Rows):
    """The first tokens of each document, labelled with the document's parity."""

    @property
    def num_rows(self) -> int:
        return len(self.source.document_ends)

    def spans(self, rows: np.ndarray, epochs: np.ndarray, seed: int) -> Spans:
        start = np.where(rows > 0, self.source.document_ends[rows - 1], 0)
        return Spans(start, np.minimum(start + self.length, self.source.document_ends[rows]))

    def batch(self, spans: Spans, width: int, training: bool) -> Batch:
        plain = super().batch(spans, width, training)
        document = np.searchsorted(self.source.document_ends, spans.start, side="right")
        return LabelledBatch(plain.tokens, valid=plain.valid, labels=torch.from_numpy(document % 2)[:, None])


@dataclass(frozen=True)
class FirstTokens(RowLayout):
    length: int = 4

    def bind(self, source: TokenSource) -> Rows:
        return DocumentStarts(source, self.length)


def test_a_layout_from_outside_the_package_works() -> None:
    loader = Loader(Stream(5, 3, 8, 2), FirstTokens(), 4)
    assert (loader.num_rows, loader.num_sequential_rows) == (4, 4)
    batch = loader.sequential_batch(0, 4)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [5, 6, 7, 0], [8, 9, 10, 11], [16, 17, 0, 0]]
    assert batch.valid is not None
    assert batch.valid.sum(1).tolist() == [4, 3, 4, 2]
    parts = [loader.batch(3, first, 2) for first in (0, 2)]
    assert sorted(torch.cat([part.tokens for part in parts]).tolist()) == batch.tokens.tolist()
    assert [(part.row_offset, part.global_batch_size) for part in parts] == [(0, 4), (2, 4)]
    for part in parts:
        assert isinstance(part, LabelledBatch), "a layout may return more than tokens"
        assert part.labels is not None
        first_tokens = {0: 0, 5: 1, 8: 0, 16: 1}
        assert part.labels[:, 0].tolist() == [first_tokens[token] for token in part.tokens[:, 0].tolist()]
        assert part.to(torch.device("cpu")).labels is not None


@pytest.mark.parametrize("layout", [ROW_LAYOUTS[name] for name in ("wrapped", "per-document")])
def test_every_layout_reads_every_token_once_in_evaluation(layout: type[RowLayout]) -> None:
    loader = Loader(Stream(5, 3, 8, 20), replace(layout(), length=4), 3)
    seen = []
    for first in range(0, loader.num_sequential_rows, 3):
        batch = loader.sequential_batch(first, 3)
        valid = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.valid is None else batch.valid
        seen += batch.tokens[valid].tolist()
    assert seen == list(range(36))


def test_rows_of_random_lengths_are_cut_in_training_only() -> None:
    loader = Loader(Stream(4000), Wrapped(16, shortest=3), batch_size=50, seed=1)
    batches = [loader.batch(step) for step in range(10)]
    lengths = torch.cat([batch.loss_mask.sum(1) for batch in batches])
    assert set(lengths.tolist()) == set(range(3, 17))
    assert abs(float(lengths.double().mean()) - 9.5) < 0.75  # 3.4 standard errors
    first, again = loader.batch(0, 10, 5), loader.batch(0)
    assert torch.equal(first.loss_mask, again.loss_mask[10:15])
    assert loader.sequential_batch(0, 50).loss_mask.all()
    assert Wrapped(16, shortest=12).with_length(8) == Wrapped(8, shortest=8)
    with pytest.raises(ValueError, match="shortest must be from 1 to the length 8; got 9"):
        Wrapped(8, shortest=9)
