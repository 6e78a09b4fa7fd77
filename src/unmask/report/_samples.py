"""Samples, and the step in which each of their tokens was unmasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unmask.data.tokenizers import BaseTokenizer, token_texts
from unmask.hardware.memory import check_memory
from unmask.model import LanguageModel
from unmask.sampling.canvas import Canvas, blank_canvas
from unmask.sampling.factory import default_sampler
from unmask.sampling.trace import Trace, record_trace
from unmask.types import Tokens

_MAX_SAMPLE_TOKENS = 512
"""Longer samples are not useful on a page."""


@dataclass(frozen=True)
class RevealedToken:
    """A token of a sample."""

    text: str
    step: int
    """The step that set its final value."""
    earlier: tuple[tuple[int, str], ...] = ()
    """Earlier values as (step, text), if it was set more than once."""


@dataclass(frozen=True)
class RevealedSample:
    """A sample of `steps` network calls, token by token."""

    tokens: tuple[RevealedToken, ...]
    steps: int
    seed: int

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(token.text for token in self.tokens)


def generate_samples(
    lm: LanguageModel,
    tokenizer: BaseTokenizer,
    n: int,
    steps: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[RevealedSample]:
    """`n` texts from the model's default sampler; text i has the seed `seed` + i. `progress` counts the steps."""
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


def _revealed_tokens(trace: Trace, sequence: int, tokenizer: BaseTokenizer, mask_id: int) -> list[RevealedToken]:
    texts = token_texts(tokenizer.decode, trace.tokens[sequence].tolist())
    tokens = []
    for position, (text, step) in enumerate(zip(texts, trace.written_step[sequence].tolist(), strict=True)):
        before = trace.history(sequence, position)[:-1]
        earlier = [(k, "" if id_ == mask_id else tokenizer.decode([id_])) for k, id_ in before]
        # A token that was set once has no history: it was masked before.
        tokens.append(RevealedToken(text, step, tuple(earlier) if len(earlier) > 1 else ()))
    return tokens
