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

from unmask.data.pairing import AnyEnd, CutPairs, EndOfText, Padding, PairRows
from unmask.types import Batch

Numbers: TypeAlias = NDArray[np.int64]


class TokenStream(Protocol):
    """A split of a corpus: concatenated documents."""

    @property
    def tokens(self) -> int:
        """How many there are."""
        ...

    @property
    def ends(self) -> Numbers:
        """Where each document ends (exclusive)."""
        ...

    def read(self, start: int, stop: int) -> Numbers:
        """The ids at start, ..., stop - 1."""
        ...


@dataclass(frozen=True)
class Wrapped:
    """Windows of `length` tokens, documents running on; the grid of windows shifts with every epoch.

    `apart`: tokens of different documents in a window do not look at each other.
    """

    length: int = 1024
    apart: bool = False

    def __post_init__(self) -> None:
        _check_length(self.length)


@dataclass(frozen=True)
class PerDocument:
    """One document a row, padded to `length`; a longer one takes several rows."""

    length: int = 1024

    def __post_init__(self) -> None:
        _check_length(self.length)


@dataclass(frozen=True)
class Pairs:
    """One pair a row of at most `length` tokens: the prompt is frozen, the answer and its end are learned.

    All rows of a step are as wide as its longest pair, rounded up, on whatever rank they are; `end` says what
    the rest of a shorter one is. `PairRows` says what is kept of a pair that is too long, and `Loader.cut`
    how many there are.
    """

    length: int = 1024
    end: AnyEnd = EndOfText()

    def __post_init__(self) -> None:
        _check_length(self.length)


Layout: TypeAlias = Wrapped | PerDocument | Pairs


@dataclass(frozen=True)
class Loader:
    """The batches of a token stream, `batch_size` rows each over all ranks."""

    stream: TokenStream
    layout: Layout
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {self.batch_size}")
        length = self.layout.length
        if isinstance(self.layout, Wrapped) and self.stream.tokens < length:
            raise ValueError(
                f"a corpus of {self.stream.tokens} tokens is shorter than one window of {length};"
                " choose a shorter length or more text"
            )
        if isinstance(self.layout, Pairs):
            len(self._pairs)  # which a corpus of other documents refuses

    @property
    def rows(self) -> int:
        """Rows in an epoch."""
        if isinstance(self.layout, Pairs):
            return len(self._pairs)
        if isinstance(self.layout, PerDocument):
            return int(self._parts[-1])
        return max(1, self.stream.tokens // self.layout.length - 1)

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """Rows first, ..., first + count - 1 of the step's global batch (all of it, if not told)."""
        count = self.batch_size - first if count is None else count
        row, epoch = self._drawn(step, first, count)
        if not isinstance(self.layout, Pairs):
            return self._read(*self._spans(row, epoch), first)
        total = max(self.batch_size, first + count)
        everyone, _ = self._drawn(step, 0, total)
        width = self._pairs.width(self._pairs.spans(everyone))
        return self._pairs.batch(self._pairs.spans(row), width, self.layout.end, first, total)

    def _drawn(self, step: int, first: int, count: int) -> tuple[Numbers, Numbers]:
        """Which rows these of the step are, and in which epoch."""
        number = step * self.batch_size + first + np.arange(count, dtype=np.int64)
        epoch, place = number // self.rows, number % self.rows
        row = np.empty_like(place)
        for e in np.unique(epoch).tolist():
            row[epoch == e] = permuted(place[epoch == e], self.rows, _key(self.seed, e))
        return row, epoch

    @property
    def cut(self) -> CutPairs | None:
        """How many pairs are too long for the layout; None where it is not one of pairs."""
        return self._pairs.cut() if isinstance(self.layout, Pairs) else None

    @property
    def rows_in_order(self) -> int:
        """Rows of the text as it stands, its tail included."""
        if isinstance(self.layout, PerDocument | Pairs):
            return self.rows
        return -(-self.stream.tokens // self.layout.length)

    def in_order(self, first: int, count: int, of: int | None = None) -> Batch:
        """Rows first, first + 1, ... of the text as it stands, each token once: for evaluation.

        With `of`, they are numbered among so many rows that lie evenly over the text. Of pairs, only the
        answer and the id that ends it count here, whatever the layout's `end`: nats do not depend on what
        stands beside them.
        """
        if not isinstance(self.layout, Pairs):
            return self._read(*self.spans_in_order(first, count, of), 0)
        spans = self._pairs.spans(self._numbers_in_order(first, count, of))
        total = max(self.batch_size, len(spans.start))
        return self._pairs.batch(spans, self._pairs.width(spans), Padding(), 0, total)

    def spans_in_order(self, first: int, count: int, of: int | None = None) -> tuple[Numbers, Numbers]:
        """Where the rows of `in_order` begin and end in the stream."""
        row = self._numbers_in_order(first, count, of)
        if isinstance(self.layout, PerDocument | Pairs):
            return self._spans(row, np.zeros_like(row))
        start = row * self.layout.length
        return start, np.minimum(start + self.layout.length, self.stream.tokens)

    def _numbers_in_order(self, first: int, count: int, of: int | None) -> Numbers:
        of = self.rows_in_order if of is None else of
        return np.arange(first, min(first + count, of), dtype=np.int64) * self.rows_in_order // of

    def _read(self, start: Numbers, stop: Numbers, first: int) -> Batch:
        length = self.layout.length
        tokens = np.zeros((len(start), length), dtype=np.int64)
        documents = None
        if isinstance(self.layout, Wrapped) and self.layout.apart:
            documents = np.zeros_like(tokens)
        for i, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
            tokens[i, : b - a] = self.stream.read(a, b)
            if documents is not None:
                documents[i, : b - a] = np.searchsorted(self.stream.ends, np.arange(a, b), side="right")
        valid = np.arange(length) < (stop - start)[:, None]
        return Batch(
            torch.from_numpy(tokens),
            valid=None if valid.all() else torch.from_numpy(valid),
            first_row=first,
            total_rows=max(self.batch_size, first + len(start)),
            documents=None if documents is None else torch.from_numpy(documents),
        )

    def _spans(self, row: Numbers, epoch: Numbers) -> tuple[Numbers, Numbers]:
        """Where the rows begin and end in the stream."""
        length = self.layout.length
        if isinstance(self.layout, Pairs):
            spans = self._pairs.spans(row)
            return spans.start, spans.stop
        if isinstance(self.layout, Wrapped):
            slack = min(length, self.stream.tokens - self.rows * length + 1)
            shift = np.array([_key(self.seed + 1, e) % slack for e in epoch.tolist()], dtype=np.int64)
            return row * length + shift, row * length + shift + length
        document = np.searchsorted(self._parts, row, side="right")
        before = np.concatenate([[0], self._parts])[document]
        begins = np.concatenate([[0], self.stream.ends])[document]
        start = begins + (row - before) * length
        return start, np.minimum(start + length, self.stream.ends[document])

    @cached_property
    def _pairs(self) -> PairRows:
        return PairRows(self.stream, self.layout.length)

    @cached_property
    def _parts(self) -> Numbers:
        """Rows up to and including each document."""
        lengths = np.diff(self.stream.ends, prepend=0)
        return np.cumsum(-(-lengths // self.layout.length))


def permuted(index: Numbers, size: int, key: int) -> Numbers:
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
            left, right = right, left ^ (_mix(right + np.uint64((key + round_ * 0x9E37) % 2**63)) & low)
        value[pending] = (left << np.uint64(half)) | right
        pending &= value >= np.uint64(size)
    return value.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
