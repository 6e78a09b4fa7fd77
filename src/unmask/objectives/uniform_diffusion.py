"""Uniform diffusion: in T steps, the sum of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) over all positions.

In continuous time (Duo, arXiv 2506.10892), with a = alpha x + (1 - alpha) pi, b the same of x_theta, and the ratios
r_v = a_v/a_z and q_v = b_v/b_z to the present token z, the integrand is

    -alpha'/alpha pi_z sum_v (q_v - r_v - r_v log(q_v/r_v)),

and the bound has a constant besides: the KL of what is left of x at t = 1 to pure noise.

No token is ever masked, so the network is queried at every position and every step. It serves as a baseline,
and shows that process, objective and network are independent of masking.
"""

from __future__ import annotations

from abc import abstractmethod
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
class UniformObjective(Objective):
    """Uniform noise: what a network's answer is, and what it costs, is up to subclasses."""

    schedule: Schedule = LogLinear()
    """The noise schedule alpha(t): P(a token is not replaced at time t)."""
    times: AnyTimes = UniformTimes()
    """The distribution that training times are drawn from."""

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        u, importance, uniform = sample_noise(denoiser, batch, self.times, generator)
        t, alpha, other = self.noise_level(u)
        z = corrupt_batch(self.noise, batch, alpha, uniform, denoiser.vocab)
        positions, vocab = batch.loss_positions(), denoiser.vocab
        z_t, x, alpha_t = (positions.gather(value) for value in (z, batch.tokens, alpha))
        weight, other = (positions.gather(value) for value in (importance, other))

        def weighted(log_x: LogX, indices: slice | Tensor) -> Tensor:
            nats = self.nats(z_t[indices], x[indices], log_x, alpha_t[indices], other[indices], vocab)
            return weight[indices].to(nats) * nats

        nats = denoiser(z, t, positions, batch.context, row_fn=weighted)
        return scatter_rows(nats + self.prior_kl(vocab), positions)

    @property
    def noise(self) -> UniformNoise:
        """How texts are corrupted."""
        return UniformNoise(self.schedule)

    def noise_level(self, u: Float64[Tensor, "B 1"]) -> tuple[Tensor, Tensor, Tensor]:
        """t, alpha and the rate -(d alpha/du)/alpha of u in [0, 1).

        Where the schedule begins below 1, the first of u are the alphas above it, for which the network is told t = 0.
        """
        before = 1 - self.schedule.alpha(torch.zeros((), dtype=torch.float64))  # on the host, as `prior_kl`
        t = ((u - before) / (1 - before)).clamp(min=0)
        alpha, slope = self.schedule.alpha(t), -self.schedule.dalpha(t) / (1 - before)
        is_before = u < before
        alpha = torch.where(is_before, 1 - u, alpha)
        return t, alpha, torch.where(is_before, 1, slope) / alpha

    def prior_kl(self, vocab: Vocab) -> Float64[Tensor, ""]:
        """KL(q(z_1 | x) || pi) of a token: the schedule may leave something of it at t = 1."""
        alpha, size = self.schedule.alpha(torch.ones((), dtype=torch.float64)), vocab.size - 1
        same, other = alpha + (1 - alpha) / size, (1 - alpha) / size
        return torch.xlogy(same, same * size) + (size - 1) * torch.xlogy(other, other * size)

    def nats(
        self,
        z: Int[Tensor, " N"],
        x: Int[Tensor, " N"],
        log_x: LogX,
        alpha: Float[Tensor, " N"],
        rate: Float[Tensor, " N"],
        vocab: Vocab,
    ) -> Float64[Tensor, " N"]:
        """rate pi_z sum_v (q_v - r_v - r_v log(q_v/r_v)) [N], as r (e^d - 1 - d) with d = log q - log r."""
        pi, a = self.noise.pi(vocab).to(log_x.device), alpha[:, None].double()
        x_onehot = torch.zeros_like(log_x, dtype=torch.float64).scatter_(-1, x[:, None], 1)
        log_r = _noisy_log_ratios(z, x_onehot, pi, a)
        difference = self.log_ratios(z, log_x.double(), pi, a) - log_r
        difference[:, vocab.mask_id] = 0
        return rate.double() * pi[z] * (log_r.exp() * (torch.expm1(difference) - difference)).sum(-1)

    @abstractmethod
    def log_ratios(
        self, z: Int[Tensor, " N"], log_x: LogX, pi: Float64[Tensor, " V"], alpha: Float64[Tensor, "N 1"]
    ) -> Float64[Tensor, "N V"]:
        """log q_v [N, V]: log p(z with v)/p(z), by the network."""


def _noisy_log_ratios(
    z: Int[Tensor, " N"], x: Float64[Tensor, "N V"], pi: Float64[Tensor, " V"], alpha: Float64[Tensor, "N 1"]
) -> Float64[Tensor, "N V"]:
    """log b_v/b_z [N, V] with b = alpha x + (1 - alpha) pi, for clean tokens that are distributed as x."""
    log_b = (alpha * x + (1 - alpha) * pi).clamp(min=1e-300).log()
    return log_b - log_b.gather(-1, z[:, None])


@dataclass(frozen=True, kw_only=True)
class UniformDiffusion(UniformObjective):
    """In T steps, the schedule's ends are set to 1 and 0 as for masking: generation starts from pure noise, at no prior
    cost."""

    steps: int | None = 1000
    """The number of steps T; None: continuous time."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            validate_steps(self.steps)

    @property
    def process(self) -> UniformNoise:
        return self.noise

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

    def noise_level(self, u: Float64[Tensor, "B 1"]) -> tuple[Tensor, Tensor, Tensor]:
        """t, alpha(t) and the alpha of the step before; in continuous time, the rate."""
        if self.steps is None:
            return super().noise_level(u)
        i = (u * self.steps).long().clamp(max=self.steps - 1) + 1
        grid = alpha_grid(self.schedule, self.steps).to(u)
        return i / self.steps, grid[i], grid[i - 1]

    def prior_kl(self, vocab: Vocab) -> Float64[Tensor, ""]:
        return super().prior_kl(vocab) if self.steps is None else torch.zeros((), dtype=torch.float64)

    def nats(
        self,
        z: Int[Tensor, " N"],
        x: Int[Tensor, " N"],
        log_x: LogX,
        alpha: Float[Tensor, " N"],
        rate: Float[Tensor, " N"],
        vocab: Vocab,
    ) -> Float64[Tensor, " N"]:
        return (super().nats if self.steps is None else self._kl)(z, x, log_x, alpha, rate, vocab)

    def log_ratios(
        self, z: Int[Tensor, " N"], log_x: LogX, pi: Float64[Tensor, " V"], alpha: Float64[Tensor, "N 1"]
    ) -> Float64[Tensor, "N V"]:
        return _noisy_log_ratios(z, log_x.exp(), pi, alpha)

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
        pi = self.noise.pi(vocab).to(log_x)
        a_s, a_t = (a[:, None].to(log_x) for a in (alpha_s, alpha_t))
        z_onehot, x_onehot = (torch.zeros_like(log_x).scatter_(-1, tokens[:, None], 1) for tokens in (z, x))
        q = posterior(z_onehot, x_onehot, pi, a_s, a_t)
        p = posterior(z_onehot, log_x.exp(), pi, a_s, a_t)
        assert self.steps is not None
        return self.steps * (q * (q.clamp(min=1e-300) / p.clamp(min=1e-300)).log()).sum(-1)
