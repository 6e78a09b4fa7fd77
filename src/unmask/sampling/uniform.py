"""Ancestral sampling for uniform noise: every open position is drawn anew at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from unmask.diffusion.categorical import SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import UniformNoise, posterior
from unmask.sampling.base import init_tokens, query_uniform, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


@dataclass(frozen=True)
class UniformAncestral:
    """T steps of z_s ~ q(z_s | z_t, x_theta), from uniformly random tokens in the holes."""

    steps: int = 128
    params: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        process, vocab = require_process(denoiser, UniformNoise), denoiser.vocab
        z = init_tokens(denoiser, canvas)
        rows = z == vocab.mask_id
        if not bool(rows.any()):
            return
        everyone = torch.arange(len(z))
        noise = seeded_uniform(canvas.seeds, z.shape[1]).to(z.device)
        z = torch.where(rows, process.corrupt(z, torch.zeros_like(noise), noise, vocab), z)
        level, pi = alpha_grid(process.schedule, self.steps).to(z.device), process.pi(vocab).to(z.device)
        for i in range(self.steps, 0, -1):
            t = torch.full((len(z), 1), i / self.steps, device=z.device)
            x = self.params.probabilities(denoiser(z, t, rows, sequence_ids=everyone)).double()
            seen = one_hot(z[rows], vocab.size).double()
            uniform = query_uniform(canvas.seeds, everyone, i, rows)
            z = z.masked_scatter(rows, sample_inverse_cdf(posterior(seen, x, pi, level[i - 1], level[i]), uniform))
            yield z
