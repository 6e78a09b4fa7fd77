"""Ancestral sampling for uniform noise: every open position is drawn anew at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from unmask.diffusion.categorical import Choice, draw
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import uniforms
from unmask.diffusion.process import UniformNoise, posterior
from unmask.diffusion.times import check_steps, levels
from unmask.sampling.base import reversed_process, row_uniforms, start
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


@dataclass(frozen=True)
class UniformAncestral:
    """T steps of z_s ~ q(z_s | z_t, x_theta), from uniformly random tokens in the holes."""

    steps: int = 128
    choice: Choice = Choice()

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        process, vocab = reversed_process(denoise, UniformNoise), denoise.vocab
        z = start(denoise, canvas)
        rows = z == vocab.mask
        if not bool(rows.any()):
            return
        everyone = torch.arange(len(z))
        noise = uniforms(canvas.seeds, z.shape[1]).to(z.device)
        z = torch.where(rows, process.corrupt(z, torch.zeros_like(noise), noise, vocab), z)
        level, pi = levels(process.schedule, self.steps).to(z.device), process.pi(vocab).to(z.device)
        for i in range(self.steps, 0, -1):
            t = torch.full((len(z), 1), i / self.steps, device=z.device)
            x = self.choice.weights(denoise(z, t, rows, which=everyone)).double()
            seen = one_hot(z[rows], vocab.size).double()
            uniform = row_uniforms(canvas.seeds, everyone, i, rows)
            z = z.masked_scatter(rows, draw(posterior(seen, x, pi, level[i - 1], level[i]), uniform))
            yield z
