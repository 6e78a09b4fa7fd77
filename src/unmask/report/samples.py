"""Samples with the order in which their tokens were revealed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unmask.data.tokenizers import Tokenizer, token_texts
from unmask.hardware.memory import check_memory
from unmask.model import LanguageModel
from unmask.sampling.canvas import Canvas, blank_canvas
from unmask.sampling.factory import default_sampler
from unmask.sampling.trace import Trace, record_trace
from unmask.types import Tokens

_MAX_SAMPLE_TOKENS = 512
"""A longer sample than this is more than anybody looks at."""


@dataclass(frozen=True)
class RevealedToken:
    """A token's share of the text, and the step that wrote it.

    `earlier`: what stood there before, as (step, text), if it was written more than once.
    """

    text: str
    step: int
    earlier: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RevealedSample:
    """A text in pieces; it was finished after `steps` calls of the network."""

    tokens: tuple[RevealedToken, ...]
    steps: int
    seed: int

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(piece.text for piece in self.tokens)


def generate_samples(
    lm: LanguageModel,
    tokenizer: Tokenizer,
    n: int,
    steps: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[RevealedSample]:
    """`count` texts from the plain sampler of the model's process, traced; row i has the seed `seed` + i.

    `report` is told the steps so far.
    """
    length = min(_MAX_SAMPLE_TOKENS, lm.denoiser.max_length or _MAX_SAMPLE_TOKENS)
    check_memory(n, length, length, lm.denoiser.backbone.lm_head.weight.shape[-1])
    canvas = Canvas(blank_canvas(n, length, lm.vocab.mask_id), tuple(range(seed, seed + n)))
    with lm.inference_mode():
        written = default_sampler(lm.denoiser, steps).run(lm.denoiser, canvas)
        trace = record_trace(_with_progress(written, progress), canvas.tokens, lm.vocab.mask_id)
    last = trace.last_step.tolist()
    return [
        RevealedSample(tuple(_revealed_tokens(trace, row, tokenizer, lm.vocab.mask_id)), last[row], seed + row)
        for row in range(n)
    ]


def _with_progress(frames: Iterator[Tokens], progress: Callable[[int], None] | None) -> Iterator[Tokens]:
    for number, frame in enumerate(frames, start=1):
        if progress is not None:
            progress(number)
        yield frame


def _revealed_tokens(trace: Trace, sequence: int, tokenizer: Tokenizer, mask_id: int) -> list[RevealedToken]:
    texts = token_texts(tokenizer.decode, trace.tokens[sequence].tolist())
    found = []
    for position, (text, step) in enumerate(zip(texts, trace.written_step[sequence].tolist(), strict=True)):
        before = trace.history(sequence, position)[:-1]
        earlier = [(k, "" if id_ == mask_id else tokenizer.decode([id_])) for k, id_ in before]
        # A hole that was filled once needs no history: it was a hole before.
        found.append(RevealedToken(text, step, tuple(earlier) if len(earlier) > 1 else ()))
    return found
