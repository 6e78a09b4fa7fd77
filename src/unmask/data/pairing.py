"""One pair of a prompt and an answer a row: what is kept of it, how wide a batch is, how rows are filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.types import Batch

Numbers: TypeAlias = NDArray[np.int64]

STEP = 8
"""Rows are as wide as a multiple of it, which many machines multiply faster."""


@runtime_checkable
class PairStream(Protocol):
    """A split of a corpus of pairs: prompt, answer and the id that ends a text, one pair after the other."""

    @property
    def ends(self) -> Numbers:
        """Where each pair ends (exclusive)."""
        ...

    @property
    def given(self) -> Numbers | None:
        """How many tokens of each are its prompt."""
        ...

    def read(self, start: int, stop: int) -> Numbers:
        """The ids at start, ..., stop - 1."""
        ...


@dataclass(frozen=True)
class EndOfText:
    """The rest of a row is the id that ends a text, again and again, and is learned: as LLaDA was trained, a
    model that fills a canvas of any length learns to stop in it."""


@dataclass(frozen=True)
class Padding:
    """The rest of a row is nobody's: not seen, not learned. Only the one id that ends the answer counts."""


AnyEnd: TypeAlias = EndOfText | Padding


@dataclass(frozen=True)
class CutPairs:
    """How many of a corpus' `pairs` do not fit into a row: so many `answers` and `prompts` are cut."""

    pairs: int
    answers: int
    prompts: int

    def __str__(self) -> str:
        return (
            f"of {self.pairs:,} pairs, {self.answers:,} lose the end of the answer"
            f" and {self.prompts:,} the beginning of the prompt"
        )


@dataclass(frozen=True)
class Spans:
    """Where each row's tokens begin and end in the stream, and where those that are given end."""

    start: Numbers
    border: Numbers
    stop: Numbers

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return int((self.stop - self.start).max(initial=1))


class PairRows:
    """The pairs of a stream as rows of at most `length` tokens.

    A pair that is longer loses the end of its answer and, with it, the id that ends a text: a cut answer is
    not taught to stop. Only a prompt that would fill the row by itself loses its beginning, so that half of
    the row is the answer's, or as much of it as the answer needs.
    """

    def __init__(self, stream: object, length: int) -> None:
        if length < 2:
            raise ValueError(f"a row of a prompt and an answer has a length of at least 2; got {length}")
        if not isinstance(stream, PairStream) or stream.given is None:
            raise ValueError(
                "this corpus is not one of pairs; prepare it with source.pairs=PromptAnswer or Chat"
            )
        given = stream.given
        if not len(given):
            raise ValueError("this split has no pairs; prepare it from more pairs or with another share")
        self.length, self._read, self._ends, self._given = length, stream.read, stream.ends, given
        self._end_of_text = int(stream.read(int(stream.ends[0]) - 1, int(stream.ends[0]))[0])

    def __len__(self) -> int:
        return len(self._ends)

    def spans(self, pair: Numbers) -> Spans:
        """What is kept of these pairs."""
        stop = np.asarray(self._ends[pair])
        begin = np.where(pair > 0, self._ends[pair - 1], 0)
        border = begin + self._given[pair]
        room = np.minimum(stop - border, self.length // 2)
        start = np.where(border - begin < self.length, begin, border - self.length + room)
        return Spans(start, border, np.minimum(stop, start + self.length))

    def cut(self) -> CutPairs:
        """What is lost for want of length."""
        every = np.arange(len(self), dtype=np.int64)
        spans = self.spans(every)
        begin = np.concatenate([[0], self._ends[:-1]])
        answers, prompts = spans.stop < self._ends, spans.start > begin
        return CutPairs(len(self), int(answers.sum()), int(prompts.sum()))

    def width(self, spans: Spans) -> int:
        """The longest row's tokens, rounded up."""
        return min(self.length, -(-spans.longest // STEP) * STEP)

    def batch(self, spans: Spans, width: int, end: AnyEnd, first: int, total: int) -> Batch:
        """Rows first, first + 1, ... of `total`, the rest of each as `end` says."""
        tokens = np.full((len(spans.start), width), self._end_of_text, dtype=np.int64)
        for row, start, stop in zip(tokens, spans.start.tolist(), spans.stop.tolist(), strict=True):
            row[: stop - start] = self._read(start, stop)
        place = np.arange(width)
        padded = place >= (spans.stop - spans.start)[:, None]
        valid = ~padded if isinstance(end, Padding) and padded.any() else None
        return Batch(
            torch.from_numpy(tokens),
            valid=None if valid is None else torch.from_numpy(valid),
            frozen=torch.from_numpy(place < (spans.border - spans.start)[:, None]),
            first_row=first,
            total_rows=total,
        )
