"""Samples with the order in which their tokens were revealed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unmask.data.tokenizer import Tokenizer, split_text
from unmask.model import LanguageModel
from unmask.model.room import check_room
from unmask.sampling.canvas import Canvas, blank
from unmask.sampling.trace import Trace, traced
from unmask.types import Tokens

MOST_TOKENS = 512
"""A longer sample than this is more than anybody looks at."""


@dataclass(frozen=True)
class Piece:
    """A token's share of the text, and the step that wrote it.

    `earlier`: what stood there before, as (step, text), if it was written more than once.
    """

    text: str
    step: int
    earlier: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Sample:
    """A text in pieces; it was finished after `steps` calls of the network."""

    pieces: tuple[Piece, ...]
    steps: int
    seed: int

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(piece.text for piece in self.pieces)


def draw_samples(
    lm: LanguageModel,
    tokenizer: Tokenizer,
    count: int,
    steps: int,
    seed: int,
    report: Callable[[int], None] | None = None,
) -> list[Sample]:
    """`count` texts from the plain sampler of the model's process, traced; row i has the seed `seed` + i.

    `report` is told the steps so far.
    """
    length = min(MOST_TOKENS, lm.denoise.max_length or MOST_TOKENS)
    check_room(count, length, length, lm.denoise.backbone.output.weight.shape[-1])
    canvas = Canvas(blank(count, length, lm.vocab.mask), tuple(range(seed, seed + count)))
    with lm.inference():
        written = lm.default_sampler(steps).run(lm.denoise, canvas)
        trace = traced(_told(written, report), canvas.tokens, lm.vocab.mask)
    last = trace.steps.tolist()
    return [
        Sample(tuple(_pieces(trace, row, tokenizer, lm.vocab.mask)), last[row], seed + row)
        for row in range(count)
    ]


def _told(frames: Iterator[Tokens], report: Callable[[int], None] | None) -> Iterator[Tokens]:
    for number, frame in enumerate(frames, start=1):
        if report is not None:
            report(number)
        yield frame


def _pieces(trace: Trace, row: int, tokenizer: Tokenizer, mask: int) -> list[Piece]:
    texts = split_text(tokenizer.decode, trace.tokens[row].tolist())
    found = []
    for position, (text, step) in enumerate(zip(texts, trace.step[row].tolist(), strict=True)):
        before = trace.writes(row, position)[:-1]
        earlier = [(k, "" if id_ == mask else tokenizer.decode([id_])) for k, id_ in before]
        # A hole that was filled once needs no history: it was a hole before.
        found.append(Piece(text, step, tuple(earlier) if len(earlier) > 1 else ()))
    return found
