"""MDLM: simple and effective masked diffusion.

Continuous time: NELBO = E integral of weight(t) * sum over masked tokens of -log x_theta(x) dt.
T steps: the same with weight T (alpha_s - alpha_t)/(1 - alpha_t) on a grid of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import Masking
from unmask.diffusion.times import Moment, check_steps, step_moment
from unmask.objectives.base import MaskedObjective, Surprise, corrupt, draw_noise, precise, scatter
from unmask.types import Batch, LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class MDLM(MaskedObjective):
    """SUBS: no mass on the mask (`zero_masking`), visible tokens are copied (`carry_over`).

    `steps` None is continuous time. Switched off, for the ablation: without zero masking the network
    may leave a token masked, as D3PM's does; without carry-over it is also charged for not copying
    the visible tokens of z_0 when it reconstructs x (samplers always copy them).
    """

    steps: int | None = None
    zero_masking: bool = True
    carry_over: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            check_steps(self.steps)
            if self.exact_counts:
                raise ValueError("exact_counts is for continuous time; leave steps out")

    @property
    def normalised(self) -> bool:
        return self.zero_masking

    @property
    def softmax(self) -> bool:
        return self.zero_masking

    @property
    def reads_alpha(self) -> bool:
        return not self.zero_masking

    def moment(self, u: Tensor) -> Moment:
        return super().moment(u) if self.steps is None else step_moment(self.schedule, self.steps, u)

    def read(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab) if self.zero_masking else absorbing(logits, alpha, vocab)

    def timed_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        nats, t = super().timed_nll(denoise, batch, generator)
        return (nats if self.carry_over else nats + self._copying(denoise, batch, generator)), t

    def _copying(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
        """-log x_theta(x | z_0) on the visible tokens of z_0."""
        u, _, noise = draw_noise(denoise, batch, self.times, generator)
        t = torch.zeros_like(u)
        z = corrupt(Masking(self.schedule), batch, self.schedule.alpha(t), noise, denoise.vocab)
        rows = (z != denoise.vocab.mask) & batch.counted
        price = Surprise.of(batch.tokens[rows])
        return scatter(denoise(z, t, rows, each=price, **batch.context), rows)


def subs(logits: Tensor, vocab: Vocab) -> LogX:
    """log_softmax over the clean tokens."""
    return precise(logits).index_fill(-1, _index(vocab, logits), -torch.inf).log_softmax(-1)


def absorbing(logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
    """D3PM's p(z_s | z_t) = q(z_s | z_t, x_theta) where x_theta has mass x_m on the mask.

    The posterior's normaliser, 1 - alpha + alpha x_m, divides the reveal of every token v:
    log_x[v] = log x_theta[v] - log(1 + x_m alpha/(1 - alpha)).
    """
    log_p = precise(logits).log_softmax(-1)
    mask_mass = log_p[:, vocab.mask, None].exp()
    log_x = log_p - torch.log1p(mask_mass * (alpha / (1 - alpha)).to(log_p))
    return log_x.index_fill(-1, _index(vocab, logits), -torch.inf)


def _index(vocab: Vocab, like: Tensor) -> Tensor:
    return torch.tensor([vocab.mask], device=like.device)
