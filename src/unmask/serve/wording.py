"""Between text and ids: a request's text as a canvas, and a filled canvas as an answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unmask.data.tokenizer import BROKEN, Tokenizer, split_text
from unmask.sampling.canvas import Template, segments
from unmask.serve.rows import Mark, Row
from unmask.serve.schemas import Alternative, Filled, Logprobs, Span, WrittenToken


@dataclass(frozen=True)
class HoledText:
    """Ids with the mask in their holes, which are given as (first position, length)."""

    ids: list[int]
    holes: list[tuple[int, int]]

    @property
    def hidden(self) -> int:
        """Tokens to be written."""
        return sum(length for _, length in self.holes)

    @property
    def given(self) -> int:
        """Tokens that are there already."""
        return len(self.ids) - self.hidden


@dataclass(frozen=True)
class Wording:
    """A tokenizer and the id of the mask."""

    tokenizer: Tokenizer
    mask: int

    def canvas(self, template: Template) -> HoledText:
        """The canvas of a template."""
        ids: list[int] = []
        holes = []
        for piece in segments(template):
            if isinstance(piece, int):
                holes.append((len(ids), piece))
                ids += [self.mask] * piece
            else:
                ids += self.tokenizer.encode(piece) if isinstance(piece, str) else self.given(piece)
        return HoledText(ids, holes)

    def given(self, ids: list[int]) -> list[int]:
        """Ids that a client sent, each of which must be a token of the tokenizer's."""
        known = self.tokenizer.size
        for id_ in ids:
            if not 0 <= id_ < known or id_ == self.mask:
                raise ValueError(f"the token {id_} is not one of the tokenizer's 0..{known - 1}")
        return ids

    def between(self, prompt: Sequence[int], tokens: int, suffix: str) -> HoledText:
        """A canvas with one hole."""
        after = self.tokenizer.encode(suffix) if suffix else []
        return HoledText([*prompt, *[self.mask] * tokens, *after], [(len(prompt), tokens)])

    def draft(self, ids: Sequence[int]) -> str:
        """What is written so far, as a template: masks are holes again."""
        parts = []
        for hidden, run in itertools.groupby(ids, key=lambda id_: id_ == self.mask):
            tokens = list(run)
            parts.append(f"<mask:{len(tokens)}>" if hidden else self.tokenizer.decode(tokens))
        return "".join(parts)

    def beginning(self, ids: Sequence[int]) -> str:
        """The text up to the first mask, without a character that is not yet whole."""
        known = list(itertools.takewhile(lambda id_: id_ != self.mask, ids))
        text = self.tokenizer.decode(known)
        return text if len(known) == len(ids) else text.rstrip(BROKEN)

    def token(self, id_: int) -> str:
        """A token by itself."""
        return self.tokenizer.decode([id_])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text cut into a piece for each id."""
        return split_text(self.tokenizer.decode, ids)

    def cut_up(self, text: str) -> tuple[list[int], list[str]]:
        """The ids of a text, and its pieces."""
        ids = self.tokenizer.encode(text)
        return ids, self.pieces(ids)

    def filled(self, row: Row, canvas: HoledText, index: int, seed: int) -> Filled:
        """A candidate as it is answered."""
        pieces = self.pieces(row.ids)
        starts = [0, *itertools.accumulate(len(piece) for piece in pieces)]
        spans = []
        for first, length in canvas.holes:
            places = range(first, first + length)
            start, end = starts[first], starts[first + length]
            tokens = [self._written(row, place, pieces[place]) for place in places]
            spans.append(Span(start=start, end=end, text="".join(pieces)[start:end], tokens=tokens))
        return Filled(index=index, seed=seed, text="".join(pieces), spans=spans, steps=max(row.steps))

    def logprobs(self, row: Row, places: Sequence[int]) -> Logprobs:
        """The tokens at these places, as OpenAI tells of them."""
        pieces = self.pieces([row.ids[place] for place in places])
        marks = [row.marks[place] for place in places]
        return Logprobs(
            tokens=pieces,
            token_logprobs=[None if mark is None else mark.logprob for mark in marks],
            top_logprobs=[
                {each.text: _log(each.probability) for each in self.alternatives(mark)} for mark in marks
            ],
            text_offset=[0, *itertools.accumulate(len(piece) for piece in pieces)][:-1],
        )

    def alternatives(self, mark: Mark | None) -> list[Alternative]:
        """What else the network held possible."""
        others = () if mark is None else mark.alternatives
        return [Alternative(id=id_, text=self.token(id_), probability=p) for id_, p in others]

    def _written(self, row: Row, place: int, text: str) -> WrittenToken:
        mark = row.marks[place]
        return WrittenToken(
            id=row.ids[place],
            text=text,
            logprob=None if mark is None else mark.logprob,
            step=row.steps[place],
            alternatives=self.alternatives(mark),
        )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -1e9


def cut(text: str, stops: Sequence[str]) -> str | None:
    """The text up to the first of the stops; None if there is none in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def sure_length(text: str, stops: Sequence[str]) -> int:
    """How many characters cannot become part of a stop when more follow."""
    longest = max((len(stop) for stop in stops), default=1)
    return max(0, len(text) - (longest - 1))
