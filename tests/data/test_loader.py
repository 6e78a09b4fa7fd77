"""batch = f(seed, step): every row once an epoch, the same for any split of the batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data.loader import Loader, PerDocument, Wrapped
from unmask.data.loader.loader import _feistel_permutation


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
    image = _feistel_permutation(np.arange(size), size, key)
    assert sorted(image.tolist()) == list(range(size))
    assert _feistel_permutation(np.array([size // 2]), size, key)[0] == image[size // 2]


def test_permutations_differ_and_mix() -> None:
    images = [_feistel_permutation(np.arange(1000), 1000, key) for key in range(20)]
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
