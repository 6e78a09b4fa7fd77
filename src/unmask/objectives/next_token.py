"""Autoregression, the exact baseline: -log p(x) = sum over l of -log p(x_l | x_1 ... x_{l-1})."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import LeftToRight, shift_right
from unmask.objectives.base import Objective
from unmask.objectives.mdlm import subs
from unmask.ops.chunked_head import WeightedNLL
from unmask.ops.packing import scatter_rows
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True)
class NextToken(Objective):
    """For a causal network, whose input is the text shifted right by one, with the mask id in front."""

    @property
    def process(self) -> LeftToRight:
        return LeftToRight()

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        vocab, positions = denoiser.vocab, batch.loss_positions()
        x = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, vocab.mask_id)
        t = torch.zeros(len(x), 1, device=x.device)
        row_fn = WeightedNLL.unweighted(positions.gather(batch.tokens))
        nll = denoiser(shift_right(x, vocab), t, positions, batch.context, row_fn=row_fn)
        return scatter_rows(nll, positions)
