"""batch = f(seed, step): shuffled rows by global number, with nothing to store.

A row's place in the shuffled order is computed, not remembered, so a run resumes anywhere, and any
number of ranks reads the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.data.loader.prompt_completion import (
    AnyPairPadding,
    PadIgnored,
    PadWithEos,
    PairBatcher,
    TruncationStats,
)
from unmask.types import Batch

IntArray: TypeAlias = NDArray[np.int64]


class TokenSource(Protocol):
    """A split of a corpus: concatenated documents."""

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        ...

    @property
    def document_ends(self) -> IntArray:
        """Where each document ends (exclusive)."""
        ...

    def read(self, start: int, stop: int) -> IntArray:
        """The ids at start, ..., stop - 1."""
        ...


@dataclass(frozen=True)
class Wrapped:
    """Windows of `length` tokens, documents running on; the grid of windows shifts with every epoch.

    `apart`: tokens of different documents in a window do not look at each other.
    """

    length: int = 1024
    isolate_documents: bool = False

    def __post_init__(self) -> None:
        _validate_length(self.length)


@dataclass(frozen=True)
class PerDocument:
    """One document a row, padded to `length`; a longer one takes several rows."""

    length: int = 1024

    def __post_init__(self) -> None:
        _validate_length(self.length)


@dataclass(frozen=True)
class PromptCompletionRows:
    """One pair a row of at most `length` tokens: the prompt is frozen, the completion and its end are learned.

    All rows of a step are as wide as its longest pair, rounded up, on whatever rank they are; `end` says what
    the rest of a shorter one is. `PairBatcher` says what is kept of a pair that is too long, and
    `Loader.truncation_stats`
    how many there are.
    """

    length: int = 1024
    padding: AnyPairPadding = PadWithEos()

    def __post_init__(self) -> None:
        _validate_length(self.length)


RowLayout: TypeAlias = Wrapped | PerDocument | PromptCompletionRows


@dataclass(frozen=True)
class Loader:
    """The batches of a token stream, `batch_size` rows each over all ranks."""

    source: TokenSource
    layout: RowLayout
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {self.batch_size}")
        length = self.layout.length
        if isinstance(self.layout, Wrapped) and self.source.num_tokens < length:
            raise ValueError(
                f"a corpus of {self.source.num_tokens} tokens is shorter than one window of {length};"
                " choose a shorter length or more text"
            )
        if isinstance(self.layout, PromptCompletionRows):
            len(self._pair_batcher)  # which a corpus of other documents refuses

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        if isinstance(self.layout, PromptCompletionRows):
            return len(self._pair_batcher)
        if isinstance(self.layout, PerDocument):
            return int(self._cumulative_rows[-1])
        return max(1, self.source.num_tokens // self.layout.length - 1)

    def batch(self, step: int, row_offset: int = 0, count: int | None = None) -> Batch:
        """Rows first, ..., first + count - 1 of the step's global batch (all of it, if not told)."""
        count = self.batch_size - row_offset if count is None else count
        row, epoch = self._row_indices(step, row_offset, count)
        if not isinstance(self.layout, PromptCompletionRows):
            return self._read_batch(*self._spans(row, epoch), row_offset)
        total = max(self.batch_size, row_offset + count)
        everyone, _ = self._row_indices(step, 0, total)
        width = self._pair_batcher.padded_length(self._pair_batcher.spans(everyone))
        return self._pair_batcher.batch(self._pair_batcher.spans(row), width, self.layout.padding, row_offset, total)

    def _row_indices(self, step: int, row_offset: int, count: int) -> tuple[IntArray, IntArray]:
        """Which rows these of the step are, and in which epoch."""
        number = step * self.batch_size + row_offset + np.arange(count, dtype=np.int64)
        epoch, place = number // self.num_rows, number % self.num_rows
        row = np.empty_like(place)
        for e in np.unique(epoch).tolist():
            row[epoch == e] = _feistel_permutation(place[epoch == e], self.num_rows, _derive_key(self.seed, e))
        return row, epoch

    @property
    def truncation_stats(self) -> TruncationStats | None:
        """How many pairs are too long for the layout; None where it is not one of pairs."""
        return self._pair_batcher.truncation_stats() if isinstance(self.layout, PromptCompletionRows) else None

    @property
    def num_sequential_rows(self) -> int:
        """Rows of the text as it stands, its tail included."""
        if isinstance(self.layout, PerDocument | PromptCompletionRows):
            return self.num_rows
        return -(-self.source.num_tokens // self.layout.length)

    def sequential_batch(self, first: int, count: int, num_windows: int | None = None) -> Batch:
        """Rows first, first + 1, ... of the text as it stands, each token once: for evaluation.

        With `of`, they are numbered among so many rows that lie evenly over the text. Of pairs, only the
        completion and the id that ends it count here, whatever the layout's `end`: nats do not depend on what
        stands beside them.
        """
        if not isinstance(self.layout, PromptCompletionRows):
            return self._read_batch(*self.sequential_spans(first, count, num_windows), 0)
        spans = self._pair_batcher.spans(self._sequential_indices(first, count, num_windows))
        total = max(self.batch_size, len(spans.start))
        return self._pair_batcher.batch(spans, self._pair_batcher.padded_length(spans), PadIgnored(), 0, total)

    def sequential_spans(self, first: int, count: int, num_windows: int | None = None) -> tuple[IntArray, IntArray]:
        """Where the rows of `in_order` begin and end in the stream."""
        row = self._sequential_indices(first, count, num_windows)
        if isinstance(self.layout, PerDocument | PromptCompletionRows):
            return self._spans(row, np.zeros_like(row))
        start = row * self.layout.length
        return start, np.minimum(start + self.layout.length, self.source.num_tokens)

    def _sequential_indices(self, first: int, count: int, num_windows: int | None) -> IntArray:
        num_windows = self.num_sequential_rows if num_windows is None else num_windows
        return (
            np.arange(first, min(first + count, num_windows), dtype=np.int64) * self.num_sequential_rows // num_windows
        )

    def _read_batch(self, start: IntArray, stop: IntArray, row_offset: int) -> Batch:
        length = self.layout.length
        tokens = np.zeros((len(start), length), dtype=np.int64)
        documents = None
        if isinstance(self.layout, Wrapped) and self.layout.isolate_documents:
            documents = np.zeros_like(tokens)
        for i, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
            tokens[i, : b - a] = self.source.read(a, b)
            if documents is not None:
                documents[i, : b - a] = np.searchsorted(self.source.document_ends, np.arange(a, b), side="right")
        valid = np.arange(length) < (stop - start)[:, None]
        return Batch(
            torch.from_numpy(tokens),
            valid=None if valid.all() else torch.from_numpy(valid),
            row_offset=row_offset,
            global_batch_size=max(self.batch_size, row_offset + len(start)),
            document_ids=None if documents is None else torch.from_numpy(documents),
        )

    def _spans(self, row: IntArray, epoch: IntArray) -> tuple[IntArray, IntArray]:
        """Where the rows begin and end in the stream."""
        length = self.layout.length
        if isinstance(self.layout, PromptCompletionRows):
            spans = self._pair_batcher.spans(row)
            return spans.start, spans.stop
        if isinstance(self.layout, Wrapped):
            slack = min(length, self.source.num_tokens - self.num_rows * length + 1)
            shift = np.array([_derive_key(self.seed + 1, e) % slack for e in epoch.tolist()], dtype=np.int64)
            return row * length + shift, row * length + shift + length
        document = np.searchsorted(self._cumulative_rows, row, side="right")
        before = np.concatenate([[0], self._cumulative_rows])[document]
        begins = np.concatenate([[0], self.source.document_ends])[document]
        start = begins + (row - before) * length
        return start, np.minimum(start + length, self.source.document_ends[document])

    @cached_property
    def _pair_batcher(self) -> PairBatcher:
        return PairBatcher(self.source, self.layout.length)

    @cached_property
    def _cumulative_rows(self) -> IntArray:
        """Rows up to and including each document."""
        lengths = np.diff(self.source.document_ends, prepend=0)
        return np.cumsum(-(-lengths // self.layout.length))


def _feistel_permutation(index: IntArray, size: int, key: int) -> IntArray:
    """Where `index` goes in a pseudo-random permutation of 0, ..., size - 1.

    Four Feistel rounds permute the next power of four; what falls outside walks on until it is inside.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    value = index.astype(np.uint64)
    pending = np.ones(len(value), dtype=bool)
    while pending.any():
        left, right = value[pending] >> np.uint64(half), value[pending] & low
        for round_ in range(4):
            left, right = (
                right,
                left ^ (_splitmix64(right + np.uint64((key + round_ * 0x9E37) % 2**63)) & low),
            )
        value[pending] = (left << np.uint64(half)) | right
        pending &= value >= np.uint64(size)
    return value.astype(np.int64)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _derive_key(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def _validate_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
