"""Ancestral sampling of uniform noise: every open position is drawn anew at every step."""

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
from unmask.sampling._unmasking import scatter_tokens
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Queries, Tokens


@dataclass(frozen=True)
class UniformAncestral(Sampler):
    """T steps of z_s ~ q(z_s | z_t, x_theta), from uniformly random tokens at the masked positions."""

    processes = (UniformNoise,)

    steps: int = 128
    """T, the number of steps; more are better and slower."""
    params: SamplingParams = SamplingParams()
    """How x_theta is changed by temperature and truncation."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    @property
    def may_remask(self) -> bool:
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        process, vocab = require_process(denoiser, UniformNoise), denoiser.vocab
        z = init_tokens(denoiser, canvas)
        open_positions = canvas.host_mask(vocab.mask_id)
        if not open_positions.any():
            return
        queries = Queries.from_host(open_positions, z.device)
        sequence, position = queries
        all_ids = torch.arange(len(z), device=z.device)
        noise = seeded_uniform(canvas.seeds, z.shape[1]).to(z.device)
        z = torch.where(z == vocab.mask_id, process.corrupt(z, torch.zeros_like(noise), noise, vocab), z)
        alphas, pi = alpha_grid(process.schedule, self.steps).to(z.device), process.pi(vocab).to(z.device)
        for i in range(self.steps, 0, -1):
            t = torch.full((len(z), 1), i / self.steps, device=z.device)
            x = self.params.probabilities(denoiser(z, t, queries, sequence_ids=all_ids)).double()
            z_t = one_hot(z[sequence, position], vocab.size).double()
            uniform = seeded_uniform(canvas.seeds, z.shape[1], i).to(z.device)[sequence, position]
            tokens = sample_inverse_cdf(posterior(z_t, x, pi, alphas[i - 1], alphas[i]), uniform)
            z = scatter_tokens(z, sequence, position, tokens)
            yield z
