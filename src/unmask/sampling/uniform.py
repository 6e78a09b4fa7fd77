"""Ancestral sampling of uniform noise: every open position is drawn anew at every step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import one_hot

from unmask.diffusion.categorical import SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import NoiseProcess, UniformNoise, UniformRatios, posterior
from unmask.diffusion.schedule import Schedule
from unmask.sampling._unmasking import scatter_tokens
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Queries, Tokens

_LEAST_ALPHA = 1e-9
"""So little of a text is told from pure noise in float64."""


class _UniformSampler(Sampler):
    """T steps from uniformly random tokens at the masked positions; what a step draws from is up to subclasses."""

    steps: int

    @property
    def may_remask(self) -> bool:
        return True

    @abstractmethod
    def alphas(self, schedule: Schedule) -> Float64[Tensor, " points"]:
        """alpha at t = 0, 1/T, ..., 1: that at 0 is 1, so that the last step leaves no noise."""

    @abstractmethod
    def reverse(
        self, z: Float64[Tensor, "N V"], log_x: LogX, pi: Float64[Tensor, " V"], alpha_s: Tensor, alpha_t: Tensor
    ) -> Float64[Tensor, "N V"]:
        """p(z_s | z_t) [N, V] by the network's rows; z_t is one-hot."""

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        process, vocab = require_process(denoiser, *self.processes), denoiser.vocab
        assert isinstance(process, NoiseProcess)
        z = init_tokens(denoiser, canvas)
        open_positions = canvas.host_mask(vocab.mask_id)
        if not open_positions.any():
            return
        queries = Queries.from_host(open_positions, z.device)
        sequence, position = queries
        all_ids = torch.arange(len(z), device=z.device)
        noise = seeded_uniform(canvas.seeds, z.shape[1]).to(z.device)
        z = torch.where(z == vocab.mask_id, process.corrupt(z, torch.zeros_like(noise), noise, vocab), z)
        alphas, pi = self.alphas(process.schedule).to(z.device), process.pi(vocab).to(z.device)
        for i in range(self.steps, 0, -1):
            t = torch.full((len(z), 1), i / self.steps, device=z.device)
            log_x = denoiser(z, t, queries, sequence_ids=all_ids)
            z_t = one_hot(z[sequence, position], vocab.size).double()
            uniform = seeded_uniform(canvas.seeds, z.shape[1], i).to(z.device)[sequence, position]
            tokens = sample_inverse_cdf(self.reverse(z_t, log_x, pi, alphas[i - 1], alphas[i]), uniform)
            z = scatter_tokens(z, sequence, position, tokens)
            yield z


@dataclass(frozen=True)
class UniformAncestral(_UniformSampler):
    """T steps of z_s ~ q(z_s | z_t, x_theta), from uniformly random tokens at the masked positions."""

    processes = (UniformNoise,)

    steps: int = 128
    """T, the number of steps; more are better and slower."""
    params: SamplingParams = SamplingParams()
    """How x_theta is changed by temperature and truncation."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    def alphas(self, schedule: Schedule) -> Float64[Tensor, " points"]:
        return alpha_grid(schedule, self.steps)

    def reverse(
        self, z: Float64[Tensor, "N V"], log_x: LogX, pi: Float64[Tensor, " V"], alpha_s: Tensor, alpha_t: Tensor
    ) -> Float64[Tensor, "N V"]:
        return posterior(z, self.params.probabilities(log_x).double(), pi, alpha_s, alpha_t)


@dataclass(frozen=True)
class RatioAncestral(_UniformSampler):
    """T steps of SEDD's analytic sampler, from uniformly random tokens at the masked positions.

    The network's ratios are b_t, what a position is at time t, up to a factor. Noise is undone by
    b_s = (b_t - (1 - alpha_t/alpha_s) pi) alpha_s/alpha_t, and z_s is drawn from q(z_t | z_s) b_s. Ratios that are not
    quite right may make a b_s negative: it is 0 then, as in the published code.
    """

    processes = (UniformRatios,)

    steps: int = 128
    """T, the number of steps; more are better and slower."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    def alphas(self, schedule: Schedule) -> Float64[Tensor, " points"]:
        """alpha at 1 is that of the schedule, but above 0: pure noise, whose ratios are all 1, says nothing."""
        alphas = schedule.alpha(torch.linspace(0, 1, self.steps + 1, dtype=torch.float64)).clamp(min=_LEAST_ALPHA)
        alphas[0] = 1
        return alphas

    def reverse(
        self, z: Float64[Tensor, "N V"], log_x: LogX, pi: Float64[Tensor, " V"], alpha_s: Tensor, alpha_t: Tensor
    ) -> Float64[Tensor, "N V"]:
        log_ratios = log_x.double().masked_fill(z.bool(), 0.0)
        b, kept = (log_ratios - log_ratios.amax(-1, keepdim=True)).exp(), alpha_t / alpha_s
        b = (b - (1 - kept) * pi * b.sum(-1, keepdim=True)).clamp(min=0)
        joint = (kept * z + (1 - kept) * (z * pi).sum(-1, keepdim=True)) * b
        return joint / joint.sum(-1, keepdim=True)
