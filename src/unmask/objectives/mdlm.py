"""MDLM: simple and effective masked diffusion.

Continuous time: NELBO = E integral of weight(t) * sum over masked tokens of -log x_theta(x) dt.
T steps: the same with weight T (alpha_s - alpha_t)/(1 - alpha_t) on a grid of times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import NoiseLevel, discrete_level, validate_steps
from unmask.diffusion.process import Masking
from unmask.objectives.base import (
    MaskedObjective,
    corrupt_batch,
    sample_noise,
    scatter_positions,
)
from unmask.ops.chunked_head import WeightedNLL, to_float32
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
            validate_steps(self.steps)
            if self.exact_mask_counts:
                raise ValueError("exact_mask_counts is for continuous time; leave steps out")

    @property
    def normalized(self) -> bool:
        return self.zero_masking

    @property
    def is_softmax(self) -> bool:
        return self.zero_masking

    @property
    def depends_on_alpha(self) -> bool:
        return not self.zero_masking

    def noise_level(self, u: Tensor) -> NoiseLevel:
        return super().noise_level(u) if self.steps is None else discrete_level(self.schedule, self.steps, u)

    def log_probs(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        return subs(logits, vocab) if self.zero_masking else _d3pm_log_probs(logits, alpha, vocab)

    def nll_and_time(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        nats, t = super().nll_and_time(denoiser, batch, generator)
        return (nats if self.carry_over else nats + self._carry_over_nll(denoiser, batch, generator)), t

    def _carry_over_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        """-log x_theta(x | z_0) on the visible tokens of z_0."""
        u, _, noise = sample_noise(denoiser, batch, self.times, generator)
        t = torch.zeros_like(u)
        z = corrupt_batch(Masking(self.schedule), batch, self.schedule.alpha(t), noise, denoiser.vocab)
        rows = (z != denoiser.vocab.mask_id) & batch.loss_mask
        price = WeightedNLL.unweighted(batch.tokens[rows])
        return scatter_positions(denoiser(z, t, rows, batch.context, row_fn=price), rows)


def subs(logits: Tensor, vocab: Vocab) -> LogX:
    """log_softmax over the clean tokens."""
    return to_float32(logits).index_fill(-1, _mask_index(vocab, logits), -torch.inf).log_softmax(-1)


def _d3pm_log_probs(logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
    """D3PM's p(z_s | z_t) = q(z_s | z_t, x_theta) where x_theta has mass x_m on the mask.

    The posterior's normaliser, 1 - alpha + alpha x_m, divides the reveal of every token v:
    log_x[v] = log x_theta[v] - log(1 + x_m alpha/(1 - alpha)).
    """
    log_p = to_float32(logits).log_softmax(-1)
    mask_mass = log_p[:, vocab.mask_id, None].exp()
    log_x = log_p - torch.log1p(mask_mass * (alpha / (1 - alpha)).to(log_p))
    return log_x.index_fill(-1, _mask_index(vocab, logits), -torch.inf)


def _mask_index(vocab: Vocab, like: Tensor) -> Tensor:
    return torch.tensor([vocab.mask_id], device=like.device)
