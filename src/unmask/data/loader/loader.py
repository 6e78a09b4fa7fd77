"""batch = f(seed, step): rows shuffled by a computed permutation, with nothing to store.

A run resumes at any step, and any number of ranks reads the same global batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from unmask.data.corpus._token_files import IntArray
from unmask.data.loader._shuffle import derive_key, feistel_permutation
from unmask.data.loader.layouts import RowLayout, Rows, Spans, TokenSource
from unmask.types import Batch


@dataclass(frozen=True)
class Loader:
    """The batches of a token source, `batch_size` rows each over all ranks."""

    source: TokenSource
    layout: RowLayout
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {self.batch_size}")
        self.rows  # noqa: B018  # raises if the layout does not fit the source

    @cached_property
    def rows(self) -> Rows:
        """The rows of the source in the layout."""
        return self.layout.bind(self.source)

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return self.rows.num_rows

    @property
    def num_sequential_rows(self) -> int:
        """Rows of the text in order, each token once."""
        return self.rows.num_sequential_rows

    def batch(self, step: int, row_offset: int = 0, count: int | None = None) -> Batch:
        """Rows row_offset, ..., row_offset + count - 1 of the step's global batch; by default, all of it."""
        count = self.batch_size - row_offset if count is None else count
        total = max(self.batch_size, row_offset + count)
        global_spans = self._global_spans(step, total)
        spans = global_spans.select(slice(row_offset, row_offset + count))
        batch = self.rows.batch(spans, self.rows.width(global_spans), training=True)
        return replace(batch, row_offset=row_offset, global_batch_size=total)

    def sequential_batch(self, first: int, count: int, num_windows: int | None = None) -> Batch:
        """Rows first, first + 1, ... of the text in order, each token once, for evaluation.

        With `num_windows`, rows are counted among so many rows at even distances.
        """
        spans = self._sequential_spans(first, count, num_windows)
        batch = self.rows.batch(spans, self.rows.width(spans), training=False)
        return replace(batch, global_batch_size=max(self.batch_size, len(spans.start)))

    def sequential_spans(self, first: int, count: int, num_windows: int | None = None) -> tuple[IntArray, IntArray]:
        """Start and stop in the token stream of the rows of `sequential_batch`."""
        spans = self._sequential_spans(first, count, num_windows)
        return spans.start, spans.stop

    def _sequential_spans(self, first: int, count: int, num_windows: int | None) -> Spans:
        num_windows = self.num_sequential_rows if num_windows is None else num_windows
        rows = np.arange(first, min(first + count, num_windows), dtype=np.int64)
        return self.rows.sequential_spans(rows * self.num_sequential_rows // num_windows)

    def _global_spans(self, step: int, count: int) -> Spans:
        """The spans of the step's global batch, kept for its other micro-batches."""
        spans = self._last_spans.get((step, count))
        if spans is None:
            spans = self.rows.spans(*self._row_indices(step, count), self.seed)
            self._last_spans.clear()
            self._last_spans[step, count] = spans
        return spans

    @cached_property
    def _last_spans(self) -> dict[tuple[int, int], Spans]:
        return {}

    def _row_indices(self, step: int, count: int) -> tuple[IntArray, IntArray]:
        """The rows of the step's global batch, and their epochs."""
        number = step * self.batch_size + np.arange(count, dtype=np.int64)
        epoch, position = number // self.num_rows, number % self.num_rows
        row = np.empty_like(position)
        for e in np.unique(epoch).tolist():
            in_epoch = epoch == e
            row[in_epoch] = feistel_permutation(position[in_epoch], self.num_rows, derive_key(self.seed, e))
        return row, epoch
