"""Uniform diffusion in T steps: sum of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta)) over all positions.

No token is ever masked, so every position is asked, at every step. It is here for comparison, and
because a process so unlike masking keeps the border between process, objective and network honest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import UniformNoise, posterior
from unmask.diffusion.schedule import AnySchedule, LogLinear
from unmask.diffusion.times import AnyTimes, UniformTimes, check_steps, levels
from unmask.objectives.base import Objective, at_rows, corrupt, draw_noise, scatter
from unmask.objectives.mdlm import subs
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class UniformDiffusion(Objective):
    """The ends are completed as for masking: text starts as pure noise, so that the prior costs nothing."""

    schedule: AnySchedule = LogLinear()
    times: AnyTimes = UniformTimes()
    steps: int = 1000

    def __post_init__(self) -> None:
        check_steps(self.steps)

    @property
    def process(self) -> UniformNoise:
        return UniformNoise(self.schedule)

    @property
    def normalised(self) -> bool:
        return True

    @property
    def softmax(self) -> bool:
        return True

    def read(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
        u, importance, noise = draw_noise(denoise, batch, self.times, generator)
        i = (u * self.steps).long().clamp(max=self.steps - 1) + 1
        level = levels(self.schedule, self.steps).to(u)
        z = corrupt(self.process, batch, level[i], noise, denoise.vocab)
        rows = batch.counted
        seen, x, vocab = z[rows], batch.tokens[rows], denoise.vocab
        alpha_s, alpha_t, weight = (at_rows(a, rows) for a in (level[i - 1], level[i], importance))

        def price(log_x: LogX, part: slice | Tensor) -> Tensor:
            kl = self._kl(seen[part], x[part], log_x, alpha_s[part], alpha_t[part], vocab)
            return self.steps * weight[part].to(kl) * kl

        return scatter(denoise(z, i / self.steps, rows, each=price, **batch.context), rows)

    def _kl(
        self, z: Tensor, x: Tensor, log_x: LogX, alpha_s: Tensor, alpha_t: Tensor, vocab: Vocab
    ) -> Tensor:
        """KL between the posteriors of the truth and of the prediction, [N]; float64 keeps the tails."""
        log_x = log_x.double()
        pi = self.process.pi(vocab).to(log_x)
        a_s, a_t = (a[:, None].to(log_x) for a in (alpha_s, alpha_t))
        seen = one_hot(z, vocab.size).to(log_x)
        truth = posterior(seen, one_hot(x, vocab.size).to(log_x), pi, a_s, a_t)
        guess = posterior(seen, log_x.exp(), pi, a_s, a_t)
        log_ratio = (truth.clamp(min=1e-300) / guess.clamp(min=1e-300)).log()
        return (truth * log_ratio).sum(-1)
