"""Autoregression: the baseline, exact. -log p(x) = sum of -log p(x_l | x_1 ... x_{l-1})."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import LeftToRight
from unmask.objectives.base import Objective, Surprise, check_batch, scatter
from unmask.objectives.mdlm import subs
from unmask.types import Batch, LogX, Tokens, Vocab


@dataclass(frozen=True)
class Autoregression(Objective):
    """For a causal network that reads the text one place late; the mask id stands before its start."""

    @property
    def process(self) -> LeftToRight:
        return LeftToRight()

    @property
    def normalised(self) -> bool:
        return True

    @property
    def softmax(self) -> bool:
        return True

    def read(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
        check_batch(denoise, batch)
        rows = batch.counted
        t = torch.zeros(len(batch.tokens), 1, device=batch.tokens.device)
        text = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, denoise.vocab.mask)
        z, price = delayed(text, denoise.vocab), Surprise.of(batch.tokens[rows])
        return scatter(denoise(z, t, rows, each=price, **batch.context), rows)


def delayed(tokens: Tokens, vocab: Vocab) -> Tokens:
    """What a causal network reads in order to write `tokens`: everything one place later."""
    return torch.cat([torch.full_like(tokens[:, :1], vocab.mask), tokens[:, :-1]], dim=1)
