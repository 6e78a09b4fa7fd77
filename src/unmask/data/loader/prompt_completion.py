"""Prompt-completion rows: truncation, batch width, and padding with EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from unmask.data.corpus._token_files import IntArray
from unmask.data.loader.layouts import RowLayout, Rows, Spans, TokenSource
from unmask.types import Batch

_PAD_MULTIPLE = 8
"""The width of a batch is a multiple of this, which many devices multiply faster."""


@dataclass(frozen=True)
class PadWithEos:
    """Pad with EOS tokens that count in the loss, as LLaDA was trained: a model that fills a canvas of any length
    learns to stop in it."""

    is_ignored: ClassVar[bool] = False


@dataclass(frozen=True)
class PadIgnored:
    """Pad with tokens that are neither attended to nor counted; only the first EOS counts."""

    is_ignored: ClassVar[bool] = True


AnyPairPadding: TypeAlias = PadWithEos | PadIgnored


@dataclass(frozen=True)
class PromptCompletionRows(RowLayout):
    """One prompt-completion pair per row: the prompt is kept clean, the completion and its EOS are learned.

    All rows of a step, on all ranks, are as wide as its longest pair, rounded up. A pair that does not fit loses
    the end of its completion, and with it the EOS: the model does not learn to stop where a completion was
    truncated. A prompt that would fill the row alone loses its beginning, so that half of the row (or less, if
    the completion is shorter) is left for the completion.
    """

    padding: AnyPairPadding = PadWithEos()
    """What follows a pair that is shorter than the batch is wide."""

    def bind(self, source: TokenSource) -> _PairRows:
        return _PairRows(source, self.length, self.padding)

    def describe(self, source: TokenSource) -> Sequence[str]:
        stats = self.bind(source).truncation_stats()
        if not stats.truncated_completions + stats.truncated_prompts:
            return []
        return [f"note: rows have {self.length:,} tokens (layout.length): {stats}"]


@dataclass(frozen=True)
class _TruncationStats:
    """How many of a corpus' pairs lose the end of the completion, or the beginning of the prompt."""

    num_pairs: int
    truncated_completions: int
    truncated_prompts: int

    def __str__(self) -> str:
        return (
            f"of {self.num_pairs:,} pairs, {self.truncated_completions:,} lose the end of the completion"
            f" and {self.truncated_prompts:,} the beginning of the prompt"
        )


class _PairRows(Rows):
    def __init__(self, source: TokenSource, length: int, padding: AnyPairPadding) -> None:
        super().__init__(source, length)
        if length < 2:
            raise ValueError(f"a row of a prompt and a completion has a length of at least 2; got {length}")
        prompt_lengths: IntArray | None = getattr(source, "prompt_lengths", None)
        if prompt_lengths is None:
            raise ValueError(
                "this corpus is not one of pairs; prepare it with source.pair_format=PromptCompletion or ChatRecord"
            )
        if not len(prompt_lengths):
            raise ValueError("this split has no pairs; prepare it from more pairs or with another validation_fraction")
        self._padding, self._ends, self._prompt_lengths = padding, source.document_ends, prompt_lengths
        self._eos_id = int(source.read(int(self._ends[0]) - 1, int(self._ends[0]))[0])

    @property
    def num_rows(self) -> int:
        return len(self._ends)

    def spans(self, rows: IntArray, epochs: IntArray, seed: int) -> Spans:
        stop = np.asarray(self._ends[rows])
        first = np.where(rows > 0, self._ends[rows - 1], 0)
        prompt_end = first + self._prompt_lengths[rows]
        room = np.minimum(stop - prompt_end, self.length // 2)
        start = np.where(prompt_end - first < self.length, first, prompt_end - self.length + room)
        return Spans(start, np.minimum(stop, start + self.length), prompt_end)

    def width(self, spans: Spans) -> int:
        longest = int((spans.stop - spans.start).max(initial=1))
        return min(self.length, -(-longest // _PAD_MULTIPLE) * _PAD_MULTIPLE)

    def batch(self, spans: Spans, width: int, training: bool) -> Batch:
        """In evaluation, padding never counts: the likelihood of a pair does not depend on the batch's width."""
        assert spans.prompt_end is not None
        position = np.arange(width)
        valid = position < (spans.stop - spans.start)[:, None]
        mask_padding = (self._padding.is_ignored or not training) and not valid.all()
        return Batch(
            torch.from_numpy(self.read(spans, width, fill=self._eos_id)),
            valid=torch.from_numpy(valid) if mask_padding else None,
            prompt_mask=torch.from_numpy(position < (spans.prompt_end - spans.start)[:, None]),
        )

    def truncation_stats(self) -> _TruncationStats:
        """How many pairs are truncated to `length`."""
        rows = np.arange(self.num_rows, dtype=np.int64)
        spans = self.spans(rows, np.zeros_like(rows), 0)
        first = np.concatenate([[0], self._ends[:-1]])
        return _TruncationStats(self.num_rows, int((spans.stop < self._ends).sum()), int((spans.start > first).sum()))
