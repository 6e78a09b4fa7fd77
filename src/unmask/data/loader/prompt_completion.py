"""One pair of a prompt and a completion a row: what is kept of it, how wide a batch is, how rows are filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.types import Batch

IntArray: TypeAlias = NDArray[np.int64]

_PAD_MULTIPLE = 8
"""Rows are as wide as a multiple of it, which many machines multiply faster."""


@runtime_checkable
class PairSource(Protocol):
    """A split of a corpus of pairs: prompt, completion and the id that ends a text, one pair after the other."""

    @property
    def document_ends(self) -> IntArray:
        """Where each pair ends (exclusive)."""
        ...

    @property
    def prompt_lengths(self) -> IntArray | None:
        """How many tokens of each are its prompt."""
        ...

    def read(self, start: int, stop: int) -> IntArray:
        """The ids at start, ..., stop - 1."""
        ...


@dataclass(frozen=True)
class PadWithEos:
    """The rest of a row is the id that ends a text, again and again, and is learned: as LLaDA was trained, a
    model that fills a canvas of any length learns to stop in it."""


@dataclass(frozen=True)
class PadIgnored:
    """The rest of a row is nobody's: not seen, not learned. Only the one id that ends the completion counts."""


AnyPairPadding: TypeAlias = PadWithEos | PadIgnored


@dataclass(frozen=True)
class TruncationStats:
    """How many of a corpus' `pairs` do not fit into a row: so many `completions` and `prompts` are cut."""

    num_pairs: int
    truncated_completions: int
    truncated_prompts: int

    def __str__(self) -> str:
        return (
            f"of {self.num_pairs:,} pairs, {self.truncated_completions:,} lose the end of the completion"
            f" and {self.truncated_prompts:,} the beginning of the prompt"
        )


@dataclass(frozen=True)
class PairSpans:
    """Where each row's tokens begin and end in the stream, and where those that are given end."""

    start: IntArray
    prompt_end: IntArray
    stop: IntArray

    @property
    def max_length(self) -> int:
        """The tokens of the longest row."""
        return int((self.stop - self.start).max(initial=1))


class PairBatcher:
    """The pairs of a stream as rows of at most `length` tokens.

    A pair that is longer loses the end of its completion and, with it, the id that ends a text: a cut completion is
    not taught to stop. Only a prompt that would fill the row by itself loses its beginning, so that half of
    the row is the completion's, or as much of it as the completion needs.
    """

    def __init__(self, source: object, length: int) -> None:
        if length < 2:
            raise ValueError(f"a row of a prompt and a completion has a length of at least 2; got {length}")
        if not isinstance(source, PairSource) or source.prompt_lengths is None:
            raise ValueError(
                "this corpus is not one of pairs; prepare it with source.pair_format=PromptCompletion or ChatRecord"
            )
        given = source.prompt_lengths
        if not len(given):
            raise ValueError("this split has no pairs; prepare it from more pairs or with another share")
        self.length, self._read, self._document_ends, self._prompt_lengths = (
            length,
            source.read,
            source.document_ends,
            given,
        )
        self._eos_id = int(source.read(int(source.document_ends[0]) - 1, int(source.document_ends[0]))[0])

    def __len__(self) -> int:
        return len(self._document_ends)

    def spans(self, indices: IntArray) -> PairSpans:
        """What is kept of these pairs."""
        stop = np.asarray(self._document_ends[indices])
        begin = np.where(indices > 0, self._document_ends[indices - 1], 0)
        border = begin + self._prompt_lengths[indices]
        room = np.minimum(stop - border, self.length // 2)
        start = np.where(border - begin < self.length, begin, border - self.length + room)
        return PairSpans(start, border, np.minimum(stop, start + self.length))

    def truncation_stats(self) -> TruncationStats:
        """What is lost for want of length."""
        every = np.arange(len(self), dtype=np.int64)
        spans = self.spans(every)
        begin = np.concatenate([[0], self._document_ends[:-1]])
        completions, prompts = spans.stop < self._document_ends, spans.start > begin
        return TruncationStats(len(self), int(completions.sum()), int(prompts.sum()))

    def padded_length(self, spans: PairSpans) -> int:
        """The longest row's tokens, rounded up."""
        return min(self.length, -(-spans.max_length // _PAD_MULTIPLE) * _PAD_MULTIPLE)

    def batch(
        self, spans: PairSpans, width: int, padding: AnyPairPadding, row_offset: int, global_batch_size: int
    ) -> Batch:
        """Rows first, first + 1, ... of `total`, the rest of each as `end` says."""
        tokens = np.full((len(spans.start), width), self._eos_id, dtype=np.int64)
        for row, start, stop in zip(tokens, spans.start.tolist(), spans.stop.tolist(), strict=True):
            row[: stop - start] = self._read(start, stop)
        place = np.arange(width)
        padded = place >= (spans.stop - spans.start)[:, None]
        valid = ~padded if isinstance(padding, PadIgnored) and padded.any() else None
        return Batch(
            torch.from_numpy(tokens),
            valid=None if valid is None else torch.from_numpy(valid),
            prompt_mask=torch.from_numpy(place < (spans.prompt_end - spans.start)[:, None]),
            row_offset=row_offset,
            global_batch_size=global_batch_size,
        )
