"""Left to right, one token at a time, with a key-value cache: the baseline's sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unmask.backbones.masks import KVCache
from unmask.diffusion.categorical import Choice
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import uniforms
from unmask.diffusion.process import LeftToRight
from unmask.objectives.ar import delayed
from unmask.sampling.base import Drawn, reversed_process, start
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


@dataclass(frozen=True)
class Autoregressive:
    """Fixed tokens are kept wherever they stand, but a hole sees only those before it."""

    choice: Choice = Choice()

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each token."""
        reversed_process(denoise, LeftToRight)
        z = start(denoise, canvas)
        hidden = z == denoise.vocab.mask
        uniform = uniforms(canvas.seeds, z.shape[1], draw=1).to(z.device)
        t = torch.zeros(len(z), 1, device=z.device)
        cache = KVCache()
        for place in hidden.any(0).nonzero()[:, 0].tolist():
            unread = delayed(z, denoise.vocab)[:, cache.end : place + 1]
            rows = torch.zeros_like(unread, dtype=torch.bool)
            rows[:, -1] = hidden[:, place]
            drawn = Drawn(self.choice, uniform[rows[:, -1], place], denoise.vocab.mask)
            z = z.clone()
            z[rows[:, -1], place] = denoise(unread, t, rows, each=drawn, beside=cache.beside())
            yield z
