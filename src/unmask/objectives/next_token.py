"""Autoregression: the baseline, exact. -log p(x) = sum of -log p(x_l | x_1 ... x_{l-1})."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import LeftToRight, shift_right
from unmask.objectives.base import Objective, scatter_positions, validate_batch
from unmask.objectives.mdlm import subs
from unmask.ops.chunked_head import WeightedNLL
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True)
class NextToken(Objective):
    """For a causal network that reads the text one place late; the mask id stands before its start."""

    @property
    def process(self) -> LeftToRight:
        return LeftToRight()

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def log_probs(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        validate_batch(denoiser, batch)
        rows = batch.loss_mask
        t = torch.zeros(len(batch.tokens), 1, device=batch.tokens.device)
        text = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, denoiser.vocab.mask_id)
        z, price = shift_right(text, denoiser.vocab), WeightedNLL.unweighted(batch.tokens[rows])
        return scatter_positions(denoiser(z, t, rows, batch.context, row_fn=price), rows)
