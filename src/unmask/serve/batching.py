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

from unmask.diffusion.denoise import Around, Denoise, Joinable
from unmask.guidance.pausing import PAUSE
from unmask.types import Each, Rows, Times, Tokens

MOST_LOGITS = 1 << 26
"""Numbers that may be answered at a time: a quarter of a gigabyte of float32."""
MOST_DRAWN = 1 << 22
"""Numbers of lines that are drawn from at a time; that takes float64, and several copies."""
SHORTEST = 64
"""Rows up to this length share calls whatever their lengths are."""

_PAUSED = object()


@dataclass(frozen=True)
class Question:
    """A call of the network that somebody waits for."""

    z: Tokens
    t: Times
    rows: Rows
    each: Each | None
    context: dict[str, Any]

    @property
    def bucket(self) -> int | None:
        """Questions of one bucket can be asked together: their lengths differ by less than a factor of two.

        None for a question with something of its own, such as a cache.
        """
        if self.context:
            return None
        return max(SHORTEST, 1 << (self.z.shape[1] - 1).bit_length())

    @cached_property
    def lines(self) -> int:
        """How many lines of log_x answer it."""
        return int(self.rows.sum()) if isinstance(self.rows, Tensor) else len(self.rows[0])


class Conversation:
    """Work that asks the network now and then; `question` is what it waits for.

    Where it computes by itself beyond the time `until` (of `time.monotonic`), it is `paused`.
    """

    def __init__(self, work: Callable[[Denoise], None], denoise: Denoise) -> None:
        self.question: Question | None = None
        self.paused = False
        self.until = float("inf")

        def run() -> None:
            PAUSE.set(self._pause)
            work(_Asking(denoise))

        self._greenlet = greenlet(run)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.question is None and not self.paused

    def begin(self) -> None:
        """Run up to the first question; what the work raises is raised here."""
        self._run()

    def answer(self, log_x: Tensor) -> None:
        """Run on to the next question."""
        self._run(log_x)

    def go_on(self) -> None:
        """Run on from a pause."""
        self._run()

    def leave(self) -> None:
        """End it where it stands; its `finally` blocks are run."""
        self.question, self.paused = None, False
        self._greenlet.throw(GreenletExit)

    def _run(self, *answer: Tensor) -> None:
        self.question, self.paused = None, False
        said = self._greenlet.switch(*answer)
        self.question, self.paused = (None, True) if said is _PAUSED else (said, False)

    def _pause(self) -> None:
        if time.monotonic() >= self.until:
            _switch_to_parent(_PAUSED)


class _Asking(Around):
    """A denoiser that asks whoever runs this greenlet."""

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        answer: Tensor = _switch_to_parent(Question(z, t, rows, each, context))
        return answer


def _switch_to_parent(said: object) -> Any:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(said)


def together(questions: Sequence[Question], most_rows: int, vocab: int) -> list[int]:
    """Which questions (their places) to ask in the next call: the first, which has waited longest, and
    those that fit to it."""
    first = questions[0]
    chosen, rows, logits = [0], len(first.z), first.lines * vocab
    if first.bucket is None:
        return chosen
    for place, other in enumerate(questions[1:], start=1):
        if other.bucket != first.bucket:
            continue
        rows, logits = rows + len(other.z), logits + other.lines * vocab
        if rows > most_rows or logits > MOST_LOGITS:
            break
        chosen.append(place)
    return chosen


def ask(denoise: Denoise, questions: Sequence[Question]) -> list[Tensor]:
    """The answers to questions of one bucket, from one call.

    What is wanted of the lines is worked out at once for all who want it in one way.
    """
    if len(questions) == 1 and not isinstance(questions[0].each, Joinable):
        (one,) = questions
        return [denoise(one.z, one.t, one.rows, each=one.each, **one.context)]
    groups = _alike(questions, MOST_DRAWN // denoise.vocab.size)
    several = [[questions[place] for place in group] for group in groups]
    log_x = _log_x(denoise, [question for group in several for question in group])
    parts = torch.split(log_x, [sum(question.lines for question in group) for group in several])
    said = [answer for group, lines in zip(several, parts, strict=True) for answer in _said(group, lines)]
    places = [place for group in groups for place in group]
    return [answer for _, answer in sorted(zip(places, said, strict=True), key=lambda pair: pair[0])]


def _alike(questions: Sequence[Question], most_lines: int) -> list[list[int]]:
    """The places of questions that want one kind of thing, of so many lines in all, or one of more."""
    groups: list[list[int]] = []
    growing: dict[Hashable, tuple[list[int], int]] = {}
    for place, question in enumerate(questions):
        each = question.each
        kind = each.kind if isinstance(each, Joinable) else place
        group, lines = growing.get(kind, ([], 0))
        if not group or lines + question.lines > most_lines:
            group, lines = [], 0
            groups.append(group)
        group.append(place)
        growing[kind] = group, lines + question.lines
    return groups


def _said(questions: Sequence[Question], log_x: Tensor) -> Sequence[Tensor]:
    """What questions of one kind want of their lines."""
    first, *others = (question.each for question in questions)
    if first is None:
        return [log_x]
    sizes = [question.lines for question in questions]
    if others:
        assert isinstance(first, Joinable)
        first = first.join(others, sizes)
    return torch.split(first(log_x, slice(None)), sizes)


def _log_x(denoise: Denoise, questions: Sequence[Question]) -> Tensor:
    """The lines of all questions one after another, from rows of one length."""
    if len(questions) == 1:
        (one,) = questions
        return denoise(one.z, one.t, one.rows, **one.context)
    lengths = [question.z.shape[1] for question in questions]
    longest = max(lengths)
    z = torch.cat([_padded(question.z, longest, 0) for question in questions])
    wide = any(question.t.shape[1] > 1 for question in questions)
    t = torch.cat(
        [
            _padded(question.t.expand(-1, length), longest, 0) if wide else question.t
            for question, length in zip(questions, lengths, strict=True)
        ]
    )
    context: dict[str, Any] = {}
    if min(lengths) < longest:
        context["valid"] = torch.cat(
            [_padded(torch.ones_like(question.z, dtype=torch.bool), longest, 0) for question in questions]
        )
    return denoise(z, t, _rows(questions, longest), **context)


def _rows(questions: Sequence[Question], longest: int) -> Rows:
    """Where all sequences are asked: as booleans, unless some are asked by index, as guidance does."""
    flags = [question.rows for question in questions if isinstance(question.rows, Tensor)]
    if len(flags) == len(questions):
        return torch.cat([_padded(rows, longest, 0) for rows in flags])
    sequences, places, before = [], [], 0
    for question in questions:
        rows = question.rows
        sequence, place = rows.nonzero(as_tuple=True) if isinstance(rows, Tensor) else rows
        sequences.append(sequence + before)
        places.append(place)
        before += len(question.z)
    return torch.cat(sequences), torch.cat(places)


def _padded(values: Tensor, length: int, filler: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]), value=filler)
