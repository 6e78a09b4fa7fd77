"""Block diffusion: autoregression over blocks, masked diffusion within.

-log p(x) = sum over blocks b of -log p(x_b | x_<b), each bounded as MDLM bounds a text, given the clean
blocks before it. One pass over [z ; x] has the answers for all blocks: a noisy block sees itself and the
clean blocks before it. Blocks as long as the text are MDLM; blocks of one token are autoregression, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.backbones.masks import Order
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import BlockMasking, Masking
from unmask.diffusion.times import Moment
from unmask.objectives.base import MaskedObjective, corrupt, draw_noise
from unmask.objectives.mdlm import subs
from unmask.types import Batch, Each, LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(MaskedObjective):
    """Every block of `block` tokens has a time of its own; times are stratified over all blocks of a
    batch."""

    block: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"a block must have at least 1 token; got {self.block}")

    @property
    def process(self) -> BlockMasking:
        return BlockMasking(self.block, self.schedule)

    @property
    def normalised(self) -> bool:
        return True

    @property
    def softmax(self) -> bool:
        return True

    def read(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def timed_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, length = batch.tokens.shape
        blocks = -(-length // self.block)

        def by_block(values: Tensor) -> Tensor:
            """[B * blocks, block] of values [B, L]; what the last block lacks is zero."""
            return F.pad(values, (0, blocks * self.block - length)).view(-1, self.block)

        def by_token(values: Tensor) -> Tensor:
            """[B, L] of values [B * blocks, 1 or block]."""
            return values.expand(-1, self.block).reshape(rows, -1)[:, :length]

        u, importance, noise = draw_noise(denoise, batch, self.times, generator, parts=blocks)
        moment, noise = self.drawn(denoise, u.view(-1, 1), by_block(noise), by_block(batch.counted))
        assert moment.jump is None
        t, alpha, weight = (by_token(values) for values in (moment.t, moment.alpha, moment.weight))
        z = corrupt(Masking(self.schedule), batch, alpha, by_token(noise), denoise.vocab)
        moment = Moment(t, alpha, None, weight)
        return self.charge(denoise, batch, z, moment, by_token(importance.view(-1, 1))), t

    def asked(
        self, denoise: Denoise, batch: Batch, z: Tensor, t: Tensor, rows: Tensor, price: Each
    ) -> Tensor:
        """The noisy text is read beside the clean one, whose time is 0."""
        order = Order.twice(z.shape[1], self.block, z.device)
        clean = batch.tokens if batch.valid is None else batch.tokens.where(batch.valid, denoise.vocab.mask)
        return denoise(
            torch.cat([z, clean], 1),
            torch.cat([t, torch.zeros_like(t)], 1),
            torch.cat([rows, torch.zeros_like(rows)], 1),
            each=price,
            order=order,
            **batch.context,
        )
