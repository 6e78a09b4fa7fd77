"""Left to right, one token at a time, with a key-value cache: the baseline's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unmask.context import Context
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.process import LeftToRight, shift_right
from unmask.sampling.base import DrawTokens, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


@dataclass(frozen=True)
class Autoregressive:
    """Fixed tokens are kept wherever they stand, but a hole sees only those before it."""

    params: SamplingParams = SamplingParams()

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each token."""
        require_process(denoiser, LeftToRight)
        z = init_tokens(denoiser, canvas)
        hidden = z == denoiser.vocab.mask_id
        uniform = seeded_uniform(canvas.seeds, z.shape[1], draw=1).to(z.device)
        t = torch.zeros(len(z), 1, device=z.device)
        cache = denoiser.new_cache()
        for place in hidden.any(0).nonzero()[:, 0].tolist():
            unread = shift_right(z, denoiser.vocab)[:, cache.end : place + 1]
            rows = torch.zeros_like(unread, dtype=torch.bool)
            rows[:, -1] = hidden[:, place]
            drawn = DrawTokens(self.params, uniform[rows[:, -1], place], denoiser.vocab.mask_id)
            z = z.clone()
            z[rows[:, -1], place] = denoiser(unread, t, rows, Context(cache=cache.view()), row_fn=drawn)
            yield z
