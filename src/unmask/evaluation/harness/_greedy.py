"""Whether a model, writing greedily after a prompt, writes a given text: the `is_greedy` of lm-evaluation-harness.

* A left-to-right model: whether every token is the most probable one after those before it. That is what greedy
  decoding writes, and takes one network call.
* Masked diffusion: whether every token is the most probable one where the whole text is masked (one network call); or,
  `one_by_one`, whether the order of highest confidence writes it, one token per step (as many calls as tokens).
* Others (uniform noise, vectors) have no such order: False.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.process import BlockMasking, Masking, shift_right
from unmask.model import LanguageModel
from unmask.sampling.canvas import infill_canvas
from unmask.sampling.factory import make_sampler
from unmask.types import Batch, LogX

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""The ids of a prompt, and of the text after it."""

_MAX_BATCH_TOKENS = 1 << 14
"""Tokens of a network call."""


def writes_greedily(lm: LanguageModel, pairs: Sequence[Pair], *, one_by_one: bool = False) -> list[bool]:
    """Of each (prompt, text), whether greedy decoding writes the text; see the module's docstring for how."""
    process, found = lm.denoiser.process, [False] * len(pairs)
    if not process.is_left_to_right and not isinstance(process, Masking | BlockMasking):
        return found
    for numbers in _batches(pairs):
        batch = [pairs[number] for number in numbers]
        hits = _next_tokens(lm, batch) if process.is_left_to_right else _unmasked(lm, batch, one_by_one)
        for number, hit in zip(numbers, hits, strict=True):
            found[number] = hit
    return found


def _batches(pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Numbers of pairs of about the same length, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number]))):
        if batch and (len(batch) + 1) * sum(map(len, pairs[batch[0]])) > _MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _canvas(pairs: Sequence[Pair], mask_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts with their texts [n, L], which positions are padded to, and which are those of the texts."""
    tokens, valid = infill_canvas([[*prompt, *text] for prompt, text in pairs], mask_id)
    begin = torch.tensor([len(prompt) for prompt, _ in pairs])[:, None]
    return tokens, valid, valid & (torch.arange(tokens.shape[1]) >= begin)


def _unmasked(lm: LanguageModel, pairs: Sequence[Pair], one_by_one: bool) -> list[bool]:
    steps = max(len(text) for _, text in pairs) if one_by_one else 1
    sampler = make_sampler(lm.denoiser, "confidence", steps, SamplingParams(temperature=0))
    tokens, valid, is_text = _canvas(pairs, lm.vocab.mask_id)
    holes = tokens.masked_fill(is_text, lm.vocab.mask_id)
    written = lm.generate(holes, sampler, 0, None if bool(valid.all()) else valid).tokens.cpu()
    hits: list[bool] = ((written == tokens) | ~is_text).all(1).tolist()
    return hits


def _next_tokens(lm: LanguageModel, pairs: Sequence[Pair]) -> list[bool]:
    tokens, valid, is_text = _canvas(pairs, lm.vocab.mask_id)
    batch = Batch(tokens.masked_fill(~valid, lm.vocab.mask_id), valid, valid & ~is_text)
    batch = batch.checked(lm.vocab).to(lm.device)
    positions = batch.loss_positions()
    targets = positions.gather(batch.tokens)

    def is_best(log_x: LogX, indices: slice | Tensor) -> Tensor:
        return log_x.argmax(-1) == targets[indices]

    with lm.inference_mode():
        t = torch.zeros(len(tokens), 1, device=lm.device)
        best = lm.predictor(shift_right(batch.tokens, lm.vocab), t, positions, batch.context, row_fn=is_best)
    missed = torch.zeros(len(tokens), device=lm.device).index_add(0, positions[0], (~best).float())
    hits: list[bool] = (missed == 0).tolist()
    return hits
