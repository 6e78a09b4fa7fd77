"""Many conversations with one network: what they ask at the same time is asked in one call.

Samplers and estimators are written as if the network were theirs alone: they call a denoiser and wait. Here
each of them runs in a greenlet, and the denoiser that it is given hands its question to whoever runs the
greenlet. So code that knows nothing of batches joins and leaves them between any two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import BatchableRowFn, DenoiserLike, DenoiserWrapper
from unmask.guidance.regex.cooperative import YIELD_HOOK
from unmask.types import Positions, RowFn, Times, Tokens

_MAX_BATCH_LOGITS = 1 << 26
"""Numbers that may be answered at a time: a quarter of a gigabyte of float32."""
_MAX_ROW_FN_LOGITS = 1 << 22
"""Numbers of lines that are drawn from at a time; that takes float64, and several copies."""
_MIN_BUCKET_LENGTH = 64
"""Rows up to this length share calls whatever their lengths are."""

_PAUSED = object()


@dataclass(frozen=True)
class ForwardCall:
    """A call of the network that somebody waits for."""

    z: Tokens
    t: Times
    positions: Positions
    row_fn: RowFn | None
    context: Context = Context()

    @property
    def bucket(self) -> int | None:
        """Questions of one bucket can be asked together: their lengths differ by less than a factor of two.

        None for a question with something of its own, such as a cache.
        """
        if not self.context.is_empty:
            return None
        return max(_MIN_BUCKET_LENGTH, 1 << (self.z.shape[1] - 1).bit_length())

    @cached_property
    def num_queries(self) -> int:
        """How many lines of log_x answer it."""
        return int(self.positions.sum()) if isinstance(self.positions, Tensor) else len(self.positions[0])


class SamplerCoroutine:
    """Work that asks the network now and then; `question` is what it waits for.

    Where it computes by itself beyond the time `until` (of `time.monotonic`), it is `paused`.
    """

    def __init__(self, work: Callable[[DenoiserLike], None], denoiser: DenoiserLike) -> None:
        self.pending_call: ForwardCall | None = None
        self.paused = False
        self.slice_deadline = float("inf")

        def run() -> None:
            YIELD_HOOK.set(self._pause)
            work(_YieldingDenoiser(denoiser))

        self._greenlet = greenlet(run)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.pending_call is None and not self.paused

    def start(self) -> None:
        """Run up to the first question; what the work raises is raised here."""
        self._switch()

    def send(self, output: Tensor) -> None:
        """Run on to the next question."""
        self._switch(output)

    def resume(self) -> None:
        """Run on from a pause."""
        self._switch()

    def cancel(self) -> None:
        """End it where it stands; its `finally` blocks are run."""
        self.pending_call, self.paused = None, False
        self._greenlet.throw(GreenletExit)

    def _switch(self, *output: Tensor) -> None:
        self.pending_call, self.paused = None, False
        said = self._greenlet.switch(*output)
        self.pending_call, self.paused = (None, True) if said is _PAUSED else (said, False)

    def _pause(self) -> None:
        if time.monotonic() >= self.slice_deadline:
            _switch_to_parent(_PAUSED)


class _YieldingDenoiser(DenoiserWrapper):
    """A denoiser that asks whoever runs this greenlet."""

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        answer: Tensor = _switch_to_parent(ForwardCall(z, t, positions, row_fn, context))
        return answer


def _switch_to_parent(value: object) -> Any:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(value)


def select_batch(calls: Sequence[ForwardCall], max_batch: int, vocab_size: int) -> list[int]:
    """Which questions (their places) to ask in the next call: the first, which has waited longest, and
    those that fit to it."""
    first = calls[0]
    chosen, rows, logits = [0], len(first.z), first.num_queries * vocab_size
    if first.bucket is None:
        return chosen
    for place, other in enumerate(calls[1:], start=1):
        if other.bucket != first.bucket:
            continue
        rows, logits = rows + len(other.z), logits + other.num_queries * vocab_size
        if rows > max_batch or logits > _MAX_BATCH_LOGITS:
            break
        chosen.append(place)
    return chosen


def run_batch(denoiser: DenoiserLike, calls: Sequence[ForwardCall]) -> list[Tensor]:
    """The answers to questions of one bucket, from one call.

    What is wanted of the lines is worked out at once for all who want it in one way.
    """
    if len(calls) == 1 and not isinstance(calls[0].row_fn, BatchableRowFn):
        (one,) = calls
        return [denoiser(one.z, one.t, one.positions, context=one.context, row_fn=one.row_fn)]
    groups = _group_by_key(calls, _MAX_ROW_FN_LOGITS // denoiser.vocab.size)
    several = [[calls[place] for place in group] for group in groups]
    log_x = _log_x(denoiser, [question for group in several for question in group])
    parts = torch.split(log_x, [sum(question.num_queries for question in group) for group in several])
    said = [answer for group, lines in zip(several, parts, strict=True) for answer in _apply_row_fn(group, lines)]
    places = [place for group in groups for place in group]
    return [answer for _, answer in sorted(zip(places, said, strict=True), key=lambda pair: pair[0])]


def _group_by_key(calls: Sequence[ForwardCall], max_queries: int) -> list[list[int]]:
    """The places of questions that want one kind of thing, of so many lines in all, or one of more."""
    groups: list[list[int]] = []
    growing: dict[Hashable, tuple[list[int], int]] = {}
    for place, question in enumerate(calls):
        each = question.row_fn
        kind = each.batch_key if isinstance(each, BatchableRowFn) else place
        group, lines = growing.get(kind, ([], 0))
        if not group or lines + question.num_queries > max_queries:
            group, lines = [], 0
            groups.append(group)
        group.append(place)
        growing[kind] = group, lines + question.num_queries
    return groups


def _apply_row_fn(calls: Sequence[ForwardCall], log_x: Tensor) -> Sequence[Tensor]:
    """What questions of one kind want of their lines."""
    first, *others = (question.row_fn for question in calls)
    if first is None:
        return [log_x]
    sizes = [question.num_queries for question in calls]
    if others:
        assert isinstance(first, BatchableRowFn)
        first = first.merge(others, sizes)
    return torch.split(first(log_x, slice(None)), sizes)


def _log_x(denoiser: DenoiserLike, calls: Sequence[ForwardCall]) -> Tensor:
    """The lines of all questions one after another, from rows of one length."""
    if len(calls) == 1:
        (one,) = calls
        return denoiser(one.z, one.t, one.positions, one.context)
    lengths = [question.z.shape[1] for question in calls]
    longest = max(lengths)
    z = torch.cat([_pad(question.z, longest, 0) for question in calls])
    wide = any(question.t.shape[1] > 1 for question in calls)
    t = torch.cat(
        [
            _pad(question.t.expand(-1, length), longest, 0) if wide else question.t
            for question, length in zip(calls, lengths, strict=True)
        ]
    )
    context = Context()
    if min(lengths) < longest:
        valid = [_pad(torch.ones_like(question.z, dtype=torch.bool), longest, 0) for question in calls]
        context = Context(valid=torch.cat(valid))
    return denoiser(z, t, _merge_positions(calls, longest), context)


def _merge_positions(calls: Sequence[ForwardCall], longest: int) -> Positions:
    """Where all sequences are asked: as booleans, unless some are asked by index, as guidance does."""
    flags = [question.positions for question in calls if isinstance(question.positions, Tensor)]
    if len(flags) == len(calls):
        return torch.cat([_pad(rows, longest, 0) for rows in flags])
    sequences, places, before = [], [], 0
    for question in calls:
        rows = question.positions
        sequence, place = rows.nonzero(as_tuple=True) if isinstance(rows, Tensor) else rows
        sequences.append(sequence + before)
        places.append(place)
        before += len(question.z)
    return torch.cat(sequences), torch.cat(places)


def _pad(values: Tensor, length: int, filler: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=filler)
