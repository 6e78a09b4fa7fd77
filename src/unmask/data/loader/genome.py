"""Rows of DNA: windows inside contigs, on either strand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unmask.data.corpus._token_files import IntArray
from unmask.data.loader._shuffle import derive_key, row_uniform
from unmask.data.loader.layouts import RowLayout, Rows, Spans, TokenSource
from unmask.types import Batch

_SCAN_TOKENS = 1 << 22
"""Tokens that are searched for N at a time."""


@dataclass(frozen=True)
class GenomeWindows(RowLayout):
    """Windows of `length` bases of DNA, each inside one contig; the windows of a contig shift with every epoch.

    A contig that is shorter is a padded row. The token after a contig is in no window.
    """

    reverse_complement: float = 0.5
    """The probability that a row of training is read on the other strand: backwards, each base complemented."""
    skip_unknown: bool = False
    """Take only windows without N, of contigs without it; otherwise N is read, but neither predicted nor counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.reverse_complement <= 1:
            raise ValueError(f"reverse_complement is a probability from 0 to 1; got {self.reverse_complement}")

    @property
    def summary(self) -> str:
        return f"windows of {self.length:,} bases, each inside one contig"

    def bind(self, source: TokenSource) -> Rows:
        complement_ids: tuple[int, ...] | None = getattr(source, "complement_ids", None)
        if complement_ids is None:
            raise ValueError(
                "GenomeWindows is for DNA, whose tokenizer knows complements: prepare with --tokenizer dna"
            )
        return _GenomeRows(source, self, np.array(complement_ids, np.int64))


class _GenomeRows(Rows):
    def __init__(self, source: TokenSource, layout: GenomeWindows, complement: IntArray) -> None:
        super().__init__(source, layout.length)
        self._layout, self._complement = layout, complement
        if not len(self._starts):
            raise ValueError(
                f"there is no stretch of {self.length} bases without N: choose a shorter layout.length, or"
                " layout.skip_unknown=false"
            )

    @property
    def num_rows(self) -> int:
        return int(self._last_rows[-1])

    def spans(self, rows: IntArray, epochs: IntArray, seed: int) -> Spans:
        segment, row = _locate(rows, self._last_rows)
        size = self._sizes[segment]
        slack = np.maximum(0, size - self._rows_of(size) * self.length)
        start, reverse = self._starts[segment] + row * self.length, np.zeros(len(rows), bool)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            shift = row_uniform(segment[now], derive_key(seed + 1, epoch)) * np.minimum(slack[now] + 1, self.length)
            start[now] += shift.astype(np.int64)
            reverse[now] = row_uniform(rows[now], derive_key(seed + 2, epoch)) < self._layout.reverse_complement
        return Spans(start, np.minimum(start + self.length, self._starts[segment] + size), reverse=reverse)

    @property
    def num_sequential_rows(self) -> int:
        return int(self._last_sequential_rows[-1])

    def sequential_spans(self, rows: IntArray) -> Spans:
        segment, row = _locate(rows, self._last_sequential_rows)
        start = self._starts[segment] + row * self.length
        return Spans(start, np.minimum(start + self.length, self._starts[segment] + self._sizes[segment]))

    def batch(self, spans: Spans, width: int, training: bool) -> Batch:
        batch = super().batch(spans, width, training)
        if spans.reverse is None:
            return batch
        tokens = batch.tokens.numpy()
        for row in np.flatnonzero(spans.reverse).tolist():
            bases = slice(0, int(spans.stop[row] - spans.start[row]))
            tokens[row, bases] = self._complement[tokens[row, bases][::-1]]
        return batch

    def _rows_of(self, size: IntArray) -> IntArray:
        """Rows of a segment in an epoch: one fewer than would fit, so that the others can shift."""
        return np.maximum(1, size // self.length - 1)

    @cached_property
    def _last_rows(self) -> IntArray:
        """Rows of training up to and including each segment."""
        return np.cumsum(self._rows_of(self._sizes))

    @cached_property
    def _last_sequential_rows(self) -> IntArray:
        return np.cumsum(-(-self._sizes // self.length))

    @cached_property
    def _starts(self) -> IntArray:
        starts: IntArray = self._segments[0]
        return starts

    @cached_property
    def _sizes(self) -> IntArray:
        sizes: IntArray = self._segments[1] - self._segments[0]
        return sizes

    @cached_property
    def _segments(self) -> IntArray:
        """Start and stop [2, segments] of the contigs, or of their stretches without N that are long enough."""
        eos_id, start, segments = getattr(self.source, "eos_id", None), 0, []
        for end in self.source.document_ends.tolist():
            stop = end - int(self.source.read(end - 1, end)[0] == eos_id)
            if self._layout.skip_unknown:
                segments += [part for part in self._known_runs(start, stop) if part[1] - part[0] >= self.length]
            elif stop > start:
                segments.append((start, stop))
            start = end
        return np.array(segments, np.int64).reshape(-1, 2).T

    def _known_runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the stretches of known bases among the tokens start, ..., stop - 1."""
        unknown_ids = getattr(self.source, "unknown_ids", ())
        last = start - 1  # the last token that is not known
        for block in range(start, stop, _SCAN_TOKENS):
            ids = self.source.read(block, min(block + _SCAN_TOKENS, stop))
            unknown = np.concatenate([[last], block + np.flatnonzero(np.isin(ids, unknown_ids))])
            for i in np.flatnonzero(np.diff(unknown) > 1).tolist():
                yield int(unknown[i]) + 1, int(unknown[i + 1])
            last = int(unknown[-1])
        if stop > last + 1:
            yield last + 1, stop


def _locate(rows: IntArray, last_rows: IntArray) -> tuple[IntArray, IntArray]:
    """The segment of each row, and its number in the segment."""
    segment = np.searchsorted(last_rows, rows, side="right")
    return segment, rows - np.where(segment > 0, last_rows[segment - 1], 0)
