"""What a row of a request has the network do: write tokens, or score a text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.denoise import Around, Denoise, Joinable
from unmask.evaluation.likelihood import score_ids
from unmask.evaluation.score import Score
from unmask.guidance import Guide
from unmask.model import LanguageModel
from unmask.sampling import AnySampler
from unmask.sampling.canvas import Canvas
from unmask.serve.engine import Work
from unmask.types import Each, LogX, Rows, Times, Tokens


@dataclass(frozen=True)
class Mark:
    """What a step did at a position: the token it wrote, or None where it hid one again.

    `logprob` is the model's own, whatever the temperature; `alternatives` are its most probable tokens with
    their probabilities. Both are None where the network was not asked.
    """

    position: int
    id: int | None
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """The canvas after a step, and what the step changed."""

    number: int
    ids: tuple[int, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Row:
    """A filled canvas: its ids and, for each position, what wrote it and in which step (0: it was given)."""

    ids: tuple[int, ...]
    marks: tuple[Mark | None, ...]
    steps: tuple[int, ...]


def writing(
    model: LanguageModel,
    ids: Sequence[int],
    sampler: AnySampler,
    seed: int,
    alternatives: int = 0,
    guide: Guide | None = None,
    enough: Callable[[Sequence[int]], bool] = lambda _: False,
) -> Work:
    """Fill the holes of `ids`, telling of every Step, until that is `enough`; the result is a Row."""
    mask = model.vocab.mask

    def work(denoise: Denoise, tell: Callable[[Any], None]) -> Row:
        heard = _Heard(model.writable(denoise))
        shown = tuple(ids)
        start = torch.tensor([shown], device=model.device)
        written: list[Mark | None] = [None] * len(ids)
        steps = [0] * len(ids)
        asked: Denoise = heard if guide is None else guide(heard, start, model.tokenizer)
        for number, z in enumerate(sampler.run(asked, Canvas(start, (seed,))), start=1):
            before, shown = shown, tuple(z[0].tolist())
            places = [place for place, (old, new) in enumerate(zip(before, shown, strict=True)) if old != new]
            marks = tuple(heard.marks(places, shown, mask, alternatives))
            for mark in marks:
                written[mark.position], steps[mark.position] = mark, number
            heard.forget()
            tell(Step(number, shown, marks))
            if enough(shown):
                break
        return Row(shown, tuple(written), tuple(steps))

    return work


def scoring(model: LanguageModel, ids: Sequence[int], draws: int, seed: int) -> Work:
    """Score a text."""

    def work(denoise: Denoise, _tell: Callable[[Any], None]) -> Score:
        return score_ids(denoise, model.objective, ids, None, draws, seed)

    return work


@dataclass(eq=False)
class _Listening(Joinable):
    """Says what another `each` says of whole lines, or the lines if there is none, and keeps them."""

    each: Joinable | None
    kept: LogX | None = None

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        self.kept = log_x
        return log_x if self.each is None else self.each(log_x, part)

    @property
    def kind(self) -> Hashable:
        return _Listening, id(self) if self.each is None else self.each.kind

    def join(self, others: Sequence[_Listening], lines: Sequence[int]) -> Each:
        assert self.each is not None
        each, everybody = self.each.join([other.each for other in others], lines), [self, *others]

        def joined(log_x: LogX, part: slice | Tensor) -> Tensor:
            for listening, own in zip(everybody, torch.split(log_x, list(lines)), strict=True):
                listening.kept = own
            return each(log_x, part)

        return joined


class _Heard(Around):
    """A denoiser that remembers its last answer."""

    def __init__(self, denoise: Denoise) -> None:
        super().__init__(denoise)
        self._line: dict[int, int] = {}
        self._log_x: LogX | None = None

    def __call__(
        self, z: Tokens, t: Times, rows: Rows, *, each: Each | None = None, **context: Any
    ) -> Tensor:
        joinable = each if isinstance(each, Joinable) else None
        listening = _Listening(joinable)
        said = self.denoise(z, t, rows, each=listening, **context)
        self._log_x = listening.kept
        sequence, place = rows.nonzero(as_tuple=True) if isinstance(rows, Tensor) else rows
        order, beside = context.get("order"), context.get("beside")
        if order is not None:
            place = order.place[place]
        elif beside is not None:
            place = place + beside.start
        pairs = enumerate(zip(sequence.tolist(), place.tolist(), strict=True))
        # Guidance reads a text again with its condition hidden, which is not what is written.
        self._line = {place: line for line, (number, place) in pairs if number == 0}
        # Anything else may fail, and then must not do so in everybody's call.
        return said if each is None or joinable is not None else each(said, slice(None))

    def forget(self) -> None:
        """The answer has been used: a row that waits must not keep the lines of a whole call in memory."""
        self._line, self._log_x = {}, None

    def marks(self, places: Sequence[int], ids: Sequence[int], mask: int, alternatives: int) -> list[Mark]:
        """What was written at these places, with what the network said there, if it was asked."""
        found = {place: Mark(place, None if ids[place] == mask else ids[place]) for place in places}
        asked = [place for place in places if place in self._line and ids[place] != mask]
        if asked and self._log_x is not None:
            lines = [self._line[place] for place in asked]
            logprobs = self._log_x[lines, [ids[place] for place in asked]].tolist()
            others = _best(self._log_x[lines], alternatives) if alternatives else [()] * len(asked)
            for place, logprob, best in zip(asked, logprobs, others, strict=True):
                found[place] = Mark(place, ids[place], logprob, best)
        return list(found.values())


def _best(log_x: LogX, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The most probable tokens of each line, and how probable they are."""
    best = log_x.topk(min(count, log_x.shape[1] - 1))
    pairs = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    return [tuple(zip(tokens, chances, strict=True)) for tokens, chances in pairs]
