"""Block diffusion: autoregression over blocks, masked diffusion within.

-log p(x) = sum over blocks b of -log p(x_b | x_<b), each bounded as MDLM bounds a text, given the clean
blocks before it. One pass over [z ; x] has the answers for all blocks: a noisy block sees itself and the
clean blocks before it. Blocks as long as the text are MDLM; blocks of one token are autoregression, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.context import AttentionStages
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import NoiseLevel
from unmask.diffusion.process import BlockMasking, Masking
from unmask.objectives.base import MaskedObjective, corrupt_batch, sample_noise
from unmask.objectives.mdlm import subs
from unmask.types import Batch, LogX, RowFn, Vocab


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(MaskedObjective):
    """Every block of `block` tokens has a time of its own; times are stratified over all blocks of a
    batch."""

    block_size: int = 16

    @classmethod
    def recommended(cls) -> Self:
        """With exact mask counts: a block has few tokens, so drawing each of them alone is noisy."""
        return cls(exact_mask_counts=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"a block must have at least 1 token; got {self.block_size}")

    @property
    def process(self) -> BlockMasking:
        return BlockMasking(self.block_size, self.schedule)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def log_probs(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def nll_and_time(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, length = batch.tokens.shape
        blocks = -(-length // self.block_size)

        def by_block(values: Tensor) -> Tensor:
            """[B * blocks, block] of values [B, L]; what the last block lacks is zero."""
            return F.pad(values, (0, blocks * self.block_size - length)).view(-1, self.block_size)

        def by_token(values: Tensor) -> Tensor:
            """[B, L] of values [B * blocks, 1 or block]."""
            return values.expand(-1, self.block_size).reshape(rows, -1)[:, :length]

        u, importance, noise = sample_noise(denoiser, batch, self.times, generator, num_blocks=blocks)
        moment, noise = self.sample_level(denoiser, u.view(-1, 1), by_block(noise), by_block(batch.loss_mask))
        assert moment.unmask_prob is None
        t, alpha, weight = (by_token(values) for values in (moment.t, moment.alpha, moment.weight))
        z = corrupt_batch(Masking(self.schedule), batch, alpha, by_token(noise), denoiser.vocab)
        moment = NoiseLevel(t, alpha, None, weight)
        return self.weighted_nll(denoiser, batch, z, moment, by_token(importance.view(-1, 1))), t

    def query(
        self, denoiser: DenoiserLike, batch: Batch, z: Tensor, t: Tensor, positions: Tensor, row_fn: RowFn
    ) -> Tensor:
        """The noisy text is read beside the clean one, whose time is 0."""
        order = AttentionStages.two_stream(z.shape[1], self.block_size, z.device)
        clean = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, denoiser.vocab.mask_id)
        return denoiser(
            torch.cat([z, clean], 1),
            torch.cat([t, torch.zeros_like(t)], 1),
            torch.cat([positions, torch.zeros_like(positions)], 1),
            replace(batch.context, stages=order),
            row_fn=row_fn,
        )
