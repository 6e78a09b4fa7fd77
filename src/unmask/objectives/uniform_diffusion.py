"""Uniform diffusion: in T steps, the sum of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) over all positions.

In continuous time (Duo, arXiv 2506.10892), with a = alpha x + (1 - alpha) pi, b the same of x_theta, and the ratios
r_v = a_v/a_z and q_v = b_v/b_z to the present token z, the integrand is

    -alpha'/alpha pi_z sum_v (q_v - r_v - r_v log(q_v/r_v)),

and the bound has a constant besides: the KL of what is left of x at t = 1 to pure noise.

No token is ever masked, so the network is queried at every position and every step. It serves as a baseline,
and shows that process, objective and network are independent of masking.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import UniformNoise, posterior
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, UniformTimes
from unmask.objectives.base import Objective, corrupt_batch, sample_noise
from unmask.objectives.mdlm import subs
from unmask.ops.packing import scatter_rows
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class UniformDiffusion(Objective):
    """In T steps, the schedule's ends are set to 1 and 0 as for masking: generation starts from pure noise, at no prior
    cost."""

    schedule: Schedule = LogLinear()
    """The noise schedule alpha(t): P(a token is not replaced at time t)."""
    times: AnyTimes = UniformTimes()
    """The distribution that training times are drawn from."""
    steps: int | None = 1000
    """The number of steps T; None: continuous time."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            validate_steps(self.steps)

    @property
    def process(self) -> UniformNoise:
        return UniformNoise(self.schedule)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def in_steps(self, steps: int | None) -> UniformDiffusion:
        return replace(self, steps=steps)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        u, importance, uniform = sample_noise(denoiser, batch, self.times, generator)
        t, alpha, other = self._noise_level(u)
        z = corrupt_batch(self.process, batch, alpha, uniform, denoiser.vocab)
        positions, vocab = batch.loss_positions(), denoiser.vocab
        z_t, x, alpha_t = (positions.gather(value) for value in (z, batch.tokens, alpha))
        weight, other = (positions.gather(value) for value in (importance, other))
        divergence = self._ratio_divergence if self.steps is None else self._kl

        def weighted(log_x: LogX, indices: slice | Tensor) -> Tensor:
            nats = divergence(z_t[indices], x[indices], log_x, alpha_t[indices], other[indices], vocab)
            return weight[indices].to(nats) * nats

        nats = denoiser(z, t, positions, batch.context, row_fn=weighted)
        return scatter_rows(nats + self._prior_kl(vocab), positions)

    def _noise_level(self, u: Float64[Tensor, "B 1"]) -> tuple[Tensor, Tensor, Tensor]:
        """t and alpha(t) of u in [0, 1); and the alpha before, or in continuous time the rate -alpha'/alpha."""
        if self.steps is None:
            alpha = self.schedule.alpha(u)
            return u, alpha, -self.schedule.dalpha(u) / alpha
        i = (u * self.steps).long().clamp(max=self.steps - 1) + 1
        grid = alpha_grid(self.schedule, self.steps).to(u)
        return i / self.steps, grid[i], grid[i - 1]

    def _prior_kl(self, vocab: Vocab) -> float:
        """KL(q(z_1 | x) || pi) of a token: in continuous time, the schedule may leave something of it at t = 1."""
        if self.steps is not None:
            return 0.0
        alpha, size = float(self.schedule.alpha(torch.ones((), dtype=torch.float64))), vocab.size - 1
        same, other = alpha + (1 - alpha) / size, (1 - alpha) / size
        return same * math.log(same * size) + ((size - 1) * other * math.log(other * size) if other > 0 else 0.0)

    def _ratio_divergence(
        self,
        z: Int[Tensor, " N"],
        x: Int[Tensor, " N"],
        log_x: LogX,
        alpha: Float[Tensor, " N"],
        rate: Float[Tensor, " N"],
        vocab: Vocab,
    ) -> Float64[Tensor, " N"]:
        """rate pi_z sum_v (q_v - r_v - r_v log(q_v/r_v)) [N], as r (e^d - 1 - d) with d = log q - log r."""
        log_x = log_x.double()
        pi, a = self.process.pi(vocab).to(log_x), alpha[:, None].to(log_x)
        x_onehot = torch.zeros_like(log_x).scatter_(-1, x[:, None], 1)
        log_r, log_q = ((a * clean + (1 - a) * pi).clamp(min=1e-300).log() for clean in (x_onehot, log_x.exp()))
        log_r, log_q = (each - each.gather(-1, z[:, None]) for each in (log_r, log_q))
        difference = log_q - log_r
        return rate.to(log_x) * pi[z] * (log_r.exp() * (torch.expm1(difference) - difference)).sum(-1)

    def _kl(
        self,
        z: Int[Tensor, " N"],
        x: Int[Tensor, " N"],
        log_x: LogX,
        alpha_t: Float[Tensor, " N"],
        alpha_s: Float[Tensor, " N"],
        vocab: Vocab,
    ) -> Float64[Tensor, " N"]:
        """T KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) [N], in float64 for the sake of small probabilities."""
        log_x = log_x.double()
        pi = self.process.pi(vocab).to(log_x)
        a_s, a_t = (a[:, None].to(log_x) for a in (alpha_s, alpha_t))
        z_onehot, x_onehot = (torch.zeros_like(log_x).scatter_(-1, tokens[:, None], 1) for tokens in (z, x))
        q = posterior(z_onehot, x_onehot, pi, a_s, a_t)
        p = posterior(z_onehot, log_x.exp(), pi, a_s, a_t)
        assert self.steps is not None
        return self.steps * (q * (q.clamp(min=1e-300) / p.clamp(min=1e-300)).log()).sum(-1)
