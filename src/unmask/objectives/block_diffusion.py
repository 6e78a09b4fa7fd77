"""Block diffusion (arXiv 2503.09573): autoregressive over blocks, masked diffusion within a block.

-log p(x) = sum over blocks b of -log p(x_b | x_<b), each bounded as MDLM bounds a text, given the clean
blocks before it. One pass over [z ; x] predicts all blocks: a noisy block attends to itself and to the
clean blocks before it. With blocks as long as the text this is MDLM; with blocks of one token it is exactly
autoregression.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from unmask.context import AttentionStages
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import NoiseLevel
from unmask.diffusion.process import BlockMasking
from unmask.objectives.base import MaskedObjective, Noise, sample_noise
from unmask.objectives.mdlm import subs
from unmask.types import Batch, LogX, Queries, RowFn, Vocab


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(MaskedObjective):
    """MDLM's loss with a noise level for each block, stratified over all blocks of a batch."""

    block_size: int = 16
    """Tokens per block."""
    from_prompt: bool = False
    """Whether blocks that are written begin at the end of the prompt, and are not counted from that of the text."""

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
        return BlockMasking(self.block_size, self.schedule, self.from_prompt)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def sample_level(
        self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator
    ) -> tuple[NoiseLevel, Tensor]:
        """A noise level for each block, given by token: [B, L]."""
        rows, length = batch.tokens.shape
        num_blocks = -(-length // self.block_size)

        def by_block(values: Tensor) -> Tensor:
            """[B * num_blocks, block_size] of values [B, L]; a last block that is too short is filled with zeros."""
            return F.pad(values, (0, num_blocks * self.block_size - length)).view(-1, self.block_size)

        def by_token(values: Tensor) -> Tensor:
            """[B, L] of values [B * num_blocks, 1 or block_size]."""
            return values.expand(-1, self.block_size).reshape(rows, -1)[:, :length]

        u, importance, uniform = sample_noise(denoiser, batch, self.times, generator, num_blocks)
        noise = Noise(u.view(-1, 1), importance.view(-1, 1), by_block(uniform))
        level, uniform = self.level_of(denoiser, noise, by_block(batch.loss_mask))
        t, alpha, weight = (by_token(values) for values in (level.t, level.alpha, level.weight))
        return NoiseLevel(t, alpha, None, weight), by_token(uniform)

    def query(
        self,
        denoiser: DenoiserLike,
        batch: Batch,
        z: Int[Tensor, "B L"],
        t: Float[Tensor, " B #L"],
        positions: Queries,
        row_fn: RowFn,
    ) -> Float[Tensor, " N"]:
        """Query the noisy text, concatenated with the clean one, whose time is 0."""
        stages = AttentionStages.two_stream(z.shape[1], self.block_size, z.device)
        clean = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, denoiser.vocab.mask_id)
        return denoiser(
            torch.cat([z, clean], 1),
            torch.cat([t, torch.zeros_like(t)], 1),
            positions.in_longer(2 * z.shape[1]),
            replace(batch.context, stages=stages),
            row_fn=row_fn,
        )
