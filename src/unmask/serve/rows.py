"""What a row of a request has the network do: write tokens, or score a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.denoise import Around, Denoise
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
        heard = _Heard(denoise)
        before = torch.tensor([list(ids)], device=model.device)
        written: list[Mark | None] = [None] * len(ids)
        steps = [0] * len(ids)
        asked: Denoise = heard if guide is None else guide(heard, before, model.tokenizer)
        for number, z in enumerate(sampler.run(asked, Canvas(before, (seed,))), start=1):
            places = (z != before)[0].nonzero()[:, 0].tolist()
            marks = tuple(heard.marks(places, z[0], mask, alternatives))
            for mark in marks:
                written[mark.position], steps[mark.position] = mark, number
            before = z
            shown = tuple(z[0].tolist())
            tell(Step(number, shown, marks))
            if enough(shown):
                break
        return Row(tuple(before[0].tolist()), tuple(written), tuple(steps))

    return work


def scoring(model: LanguageModel, ids: Sequence[int], draws: int, seed: int) -> Work:
    """Score a text."""

    def work(denoise: Denoise, _tell: Callable[[Any], None]) -> Score:
        return score_ids(denoise, model.objective, ids, None, draws, seed)

    return work


class _Heard(Around):
    """A denoiser that remembers its last answer."""

    def __init__(self, denoise: Denoise) -> None:
        super().__init__(denoise)
        self._line: dict[int, int] = {}
        self._log_x: Tensor | None = None

    def __call__(
        self, z: Tokens, t: Times, rows: Rows, *, each: Each | None = None, **context: Any
    ) -> Tensor:
        log_x = self.denoise(z, t, rows, **context)
        asked = rows[0].nonzero()[:, 0] if isinstance(rows, Tensor) else rows[1]
        order, beside = context.get("order"), context.get("beside")
        if order is not None:
            asked = order.place[asked]
        elif beside is not None:
            asked = asked + beside.start
        self._line = {place: line for line, place in enumerate(asked.tolist())}
        self._log_x = log_x
        return log_x if each is None else each(log_x, slice(None))

    def marks(self, places: Sequence[int], ids: Tensor, mask: int, alternatives: int) -> list[Mark]:
        """What was written at these places, with what the network said there."""
        found = []
        for place in places:
            id_ = int(ids[place])
            line = self._at(place)
            if id_ == mask or line is None:
                found.append(Mark(place, None if id_ == mask else id_))
                continue
            best = line.topk(min(alternatives, len(line) - 1)) if alternatives else None
            others = (
                () if best is None else zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
            )
            found.append(Mark(place, id_, float(line[id_]), tuple(others)))
        return found

    def _at(self, place: int) -> LogX | None:
        """The line of log_x of a place, if the network was asked there."""
        if self._log_x is None or place not in self._line:
            return None
        return self._log_x[self._line[place]]
