"""Uniform diffusion in T steps: sum of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) over all positions.

No token is ever masked, so every position is asked, at every step. It is here for comparison, and
because a process so unlike masking keeps the border between process, objective and network honest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import UniformNoise, posterior
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, UniformTimes
from unmask.objectives.base import Objective, corrupt_batch, gather_positions, sample_noise, scatter_positions
from unmask.objectives.mdlm import subs
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class UniformDiffusion(Objective):
    """The ends are completed as for masking: text starts as pure noise, so that the prior costs nothing."""

    schedule: Schedule = LogLinear()
    times: AnyTimes = UniformTimes()
    steps: int = 1000

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

    def log_probs(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        u, importance, noise = sample_noise(denoiser, batch, self.times, generator)
        i = (u * self.steps).long().clamp(max=self.steps - 1) + 1
        level = alpha_grid(self.schedule, self.steps).to(u)
        z = corrupt_batch(self.process, batch, level[i], noise, denoiser.vocab)
        rows = batch.loss_mask
        seen, x, vocab = z[rows], batch.tokens[rows], denoiser.vocab
        alpha_s, alpha_t, weight = (gather_positions(a, rows) for a in (level[i - 1], level[i], importance))

        def price(log_x: LogX, indices: slice | Tensor) -> Tensor:
            kl = self._kl(seen[indices], x[indices], log_x, alpha_s[indices], alpha_t[indices], vocab)
            return self.steps * weight[indices].to(kl) * kl

        return scatter_positions(denoiser(z, i / self.steps, rows, batch.context, row_fn=price), rows)

    def _kl(self, z: Tensor, x: Tensor, log_x: LogX, alpha_s: Tensor, alpha_t: Tensor, vocab: Vocab) -> Tensor:
        """KL between the posteriors of the truth and of the prediction, [N]; float64 keeps the tails."""
        log_x = log_x.double()
        pi = self.process.pi(vocab).to(log_x)
        a_s, a_t = (a[:, None].to(log_x) for a in (alpha_s, alpha_t))
        seen = one_hot(z, vocab.size).to(log_x)
        truth = posterior(seen, one_hot(x, vocab.size).to(log_x), pi, a_s, a_t)
        guess = posterior(seen, log_x.exp(), pi, a_s, a_t)
        log_ratio = (truth.clamp(min=1e-300) / guess.clamp(min=1e-300)).log()
        return (truth * log_ratio).sum(-1)
