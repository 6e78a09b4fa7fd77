"""Uniform diffusion in T steps: sum of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) over all positions.

No token is ever masked, so the network is queried at every position and every step. It serves as a baseline,
and shows that process, objective and network are independent of masking.
"""

from __future__ import annotations

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
    """The schedule's ends are set to 1 and 0 as for masking: generation starts from pure noise, at no prior cost."""

    schedule: Schedule = LogLinear()
    """The noise schedule alpha(t): P(a token is not replaced at time t)."""
    times: AnyTimes = UniformTimes()
    """The distribution that training times are drawn from."""
    steps: int = 1000
    """The number of steps T."""

    def __post_init__(self) -> None:
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

    def in_steps(self, steps: int | None) -> UniformDiffusion | None:
        return None if steps is None else replace(self, steps=steps)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        u, importance, uniform = sample_noise(denoiser, batch, self.times, generator)
        i = (u * self.steps).long().clamp(max=self.steps - 1) + 1
        alpha = alpha_grid(self.schedule, self.steps).to(u)
        z = corrupt_batch(self.process, batch, alpha[i], uniform, denoiser.vocab)
        positions, vocab = batch.loss_positions(), denoiser.vocab
        z_t, x = positions.gather(z), positions.gather(batch.tokens)
        values = (alpha[i - 1], alpha[i], importance)
        alpha_s, alpha_t, weight = (positions.gather(value) for value in values)

        def weighted_kl(log_x: LogX, indices: slice | Tensor) -> Tensor:
            kl = self._kl(z_t[indices], x[indices], log_x, alpha_s[indices], alpha_t[indices], vocab)
            return self.steps * weight[indices].to(kl) * kl

        nats = denoiser(z, i / self.steps, positions, batch.context, row_fn=weighted_kl)
        return scatter_rows(nats, positions)

    def _kl(
        self,
        z: Int[Tensor, " N"],
        x: Int[Tensor, " N"],
        log_x: LogX,
        alpha_s: Float[Tensor, " N"],
        alpha_t: Float[Tensor, " N"],
        vocab: Vocab,
    ) -> Float64[Tensor, " N"]:
        """KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) [N], in float64 for the sake of small probabilities."""
        log_x = log_x.double()
        pi = self.process.pi(vocab).to(log_x)
        a_s, a_t = (a[:, None].to(log_x) for a in (alpha_s, alpha_t))
        z_onehot, x_onehot = (torch.zeros_like(log_x).scatter_(-1, tokens[:, None], 1) for tokens in (z, x))
        q = posterior(z_onehot, x_onehot, pi, a_s, a_t)
        p = posterior(z_onehot, log_x.exp(), pi, a_s, a_t)
        return (q * (q.clamp(min=1e-300) / p.clamp(min=1e-300)).log()).sum(-1)
