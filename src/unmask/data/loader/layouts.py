"""Row layouts: how the token stream of a split becomes rows of a batch.

A layout is a frozen dataclass, so that it can be saved to JSON. `layout.bind(source)` gives its `Rows` over one
split; `Loader` needs nothing else, so a layout from outside the package works like those here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.data.corpus._token_files import IntArray
from unmask.data.loader._shuffle import derive_key, row_uniform
from unmask.types import Batch


class TokenSource(Protocol):
    """A split of a corpus: concatenated documents. Some layouts need more, as `corpus.Split` has it: pairs their
    `prompt_lengths`, DNA its `complement_ids`."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents."""
        ...

    @property
    def document_ends(self) -> IntArray:
        """The end of each document (exclusive)."""
        ...

    def read(self, start: int, stop: int) -> IntArray:
        """The ids at start, ..., stop - 1."""
        ...


class Spans(NamedTuple):
    """The tokens of each row: `start`, ..., `stop` - 1 of the stream; the prompt, if any, ends at `prompt_end`.

    `reverse` [rows] is True for rows of DNA that are read on the other strand.
    """

    start: IntArray
    stop: IntArray
    prompt_end: IntArray | None = None
    reverse: NDArray[np.bool_] | None = None

    def select(self, rows: slice) -> Spans:
        """The spans of some of the rows."""
        return Spans(*(None if values is None else values[rows] for values in self))  # type: ignore[arg-type]


class Rows(ABC):
    """The rows of a token source in one layout, of at most `length` tokens each."""

    def __init__(self, source: TokenSource, length: int) -> None:
        self.source, self.length = source, length

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows in an epoch of training."""

    @abstractmethod
    def spans(self, rows: IntArray, epochs: IntArray, seed: int) -> Spans:
        """The tokens of these rows of an epoch."""

    @property
    def num_sequential_rows(self) -> int:
        """Rows that hold every token once, for evaluation."""
        return self.num_rows

    def sequential_spans(self, rows: IntArray) -> Spans:
        """The tokens of these rows in evaluation: every token once, in order."""
        return self.spans(rows, np.zeros_like(rows), 0)

    def width(self, spans: Spans) -> int:
        """The width of a global batch with these rows."""
        return self.length

    def batch(self, spans: Spans, width: int, training: bool) -> Batch:
        """The rows as a batch, padded to `width`; padding is neither noised nor counted."""
        lengths = spans.stop - spans.start
        valid = np.arange(width) < lengths[:, None]
        return Batch(torch.from_numpy(self.read(spans, width)), valid=None if valid.all() else torch.from_numpy(valid))

    def read(self, spans: Spans, width: int, fill: int = 0) -> IntArray:
        """The ids of the rows [B, width], padded with `fill`."""
        tokens = np.full((len(spans.start), width), fill, dtype=np.int64)
        for row, start, stop in zip(tokens, spans.start.tolist(), spans.stop.tolist(), strict=True):
            row[: stop - start] = self.source.read(start, stop)
        return tokens


@dataclass(frozen=True)
class RowLayout(ABC):
    """How documents are laid out in rows. Subclasses are frozen dataclasses, too."""

    length: int = 1024
    """Tokens of a row, at most."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1; got {self.length}")

    @abstractmethod
    def bind(self, source: TokenSource) -> Rows:
        """The rows of a source in this layout; raises if it does not fit."""

    def with_length(self, length: int) -> Self:
        """The same layout with rows of another length."""
        return replace(self, length=length)

    def describe(self, source: TokenSource) -> Sequence[str]:
        """Lines to read before training on this source."""
        return []

    @property
    def summary(self) -> str:
        """What the rows of an evaluation are, in a few words."""
        return f"rows of at most {self.length:,} tokens"


@dataclass(frozen=True)
class Wrapped(RowLayout):
    """Windows of `length` tokens of the concatenated documents; the grid of windows shifts with every epoch."""

    isolate_documents: bool = False
    """Tokens attend only to tokens of the same document."""
    shortest: int | None = None
    """Rows are cut to random lengths from this one on, to learn texts of all lengths; None: no row is cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest is not None and not 1 <= self.shortest <= self.length:
            raise ValueError(f"shortest must be from 1 to the length {self.length}; got {self.shortest}")

    def with_length(self, length: int) -> Wrapped:
        return replace(self, length=length, shortest=self.shortest and min(self.shortest, length))

    def bind(self, source: TokenSource) -> Rows:
        if source.num_tokens < self.length:
            raise ValueError(
                f"a corpus of {source.num_tokens} tokens is shorter than one window of {self.length};"
                " choose a shorter length or more text"
            )
        return _WrappedRows(source, self.length, self.isolate_documents, self.shortest or self.length)

    @property
    def summary(self) -> str:
        return f"windows of {self.length:,} tokens of all documents one after another, each by itself"


class _WrappedRows(Rows):
    def __init__(self, source: TokenSource, length: int, isolate_documents: bool, shortest: int) -> None:
        super().__init__(source, length)
        self._isolate_documents, self._shortest = isolate_documents, shortest

    @property
    def num_rows(self) -> int:
        return max(1, self.source.num_tokens // self.length - 1)

    def spans(self, rows: IntArray, epochs: IntArray, seed: int) -> Spans:
        num_shifts = min(self.length, self.source.num_tokens - self.num_rows * self.length + 1)
        start = rows * self.length
        for epoch in np.unique(epochs).tolist():
            start[epochs == epoch] += derive_key(seed + 1, epoch) % num_shifts
        return Spans(start, start + self._lengths(rows, epochs, seed))

    def _lengths(self, rows: IntArray, epochs: IntArray, seed: int) -> IntArray:
        """Uniform from the shortest to the longest, as a function of seed, epoch and row."""
        choices, lengths = self.length - self._shortest + 1, np.full_like(rows, self.length)
        for epoch in np.unique(epochs).tolist() if choices > 1 else ():
            inside = epochs == epoch
            share = row_uniform(rows[inside], derive_key(seed + 2, epoch))
            lengths[inside] = self._shortest + (share * choices).astype(np.int64)
        return lengths

    @property
    def num_sequential_rows(self) -> int:
        return -(-self.source.num_tokens // self.length)

    def sequential_spans(self, rows: IntArray) -> Spans:
        start = rows * self.length
        return Spans(start, np.minimum(start + self.length, self.source.num_tokens))

    def batch(self, spans: Spans, width: int, training: bool) -> Batch:
        batch = super().batch(spans, width, training)
        if not self._isolate_documents:
            return batch
        document_ids = np.zeros((len(spans.start), width), dtype=np.int64)
        for row, start, stop in zip(document_ids, spans.start.tolist(), spans.stop.tolist(), strict=True):
            row[: stop - start] = np.searchsorted(self.source.document_ends, np.arange(start, stop), side="right")
        return Batch(batch.tokens, valid=batch.valid, document_ids=torch.from_numpy(document_ids))


@dataclass(frozen=True)
class PerDocument(RowLayout):
    """One document per row, padded to `length`; a longer document takes several rows."""

    def bind(self, source: TokenSource) -> Rows:
        return _DocumentRows(source, self.length)

    @property
    def summary(self) -> str:
        return f"documents by themselves, in windows of {self.length:,} tokens"


class _DocumentRows(Rows):
    @property
    def num_rows(self) -> int:
        return int(self._cumulative_rows[-1])

    def spans(self, rows: IntArray, epochs: IntArray, seed: int) -> Spans:
        document = np.searchsorted(self._cumulative_rows, rows, side="right")
        is_first = document == 0
        rows_before = np.where(is_first, 0, self._cumulative_rows[document - 1])
        document_start = np.where(is_first, 0, self.source.document_ends[document - 1])
        start = document_start + (rows - rows_before) * self.length
        return Spans(start, np.minimum(start + self.length, self.source.document_ends[document]))

    @cached_property
    def _cumulative_rows(self) -> IntArray:
        """Rows up to and including each document."""
        lengths = np.diff(self.source.document_ends, prepend=0)
        return np.cumsum(-(-lengths // self.length))
