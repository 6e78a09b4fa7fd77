"""Noise levels: at which t and alpha a sequence is corrupted, and what weight its loss has.

Schedules may leave a few tokens visible at t = 1 (alpha(1) = eps) or mask a few at t = 0. The KL between
q(z_1 | x) and an all-mask prior would be infinite for any eps > 0, and an estimate without it is no bound. Here,
as in the samplers, generation starts with masks only and ends with none, so alpha runs from exactly 0 to
exactly 1:

* in continuous time, values of alpha below alpha(1) belong to t = 1 (the prior term) and values above alpha(0)
  to t = 0 (the reconstruction term);
* in T steps, the first step starts at alpha = 0 and the last one ends at alpha = 1.

For a schedule with alpha(1) = 0 and alpha(0) = 1 both terms vanish, and this is the usual bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Schedule

MAX_STEPS = 1 << 20
"""With more steps the bound differs from that of continuous time by a millionth of a nat."""


class NoiseLevel(NamedTuple):
    """A reverse step from time t, for each sequence (float64 [B, 1]) or each token ([B, L])."""

    t: Float64[Tensor, " B #L"]
    """The time that the network is conditioned on."""
    alpha: Float64[Tensor, " B #L"]
    """P(a token is visible) at t, with which z is drawn."""
    unmask_prob: Float64[Tensor, " B #L"] | None
    """P(the step unmasks a masked token); None for an infinitesimal step."""
    weight: Float64[Tensor, " B #L"]
    """The factor of a masked token's loss."""

    def to(self, device: torch.device) -> NoiseLevel:
        """The same level on another device."""
        unmask_prob = None if self.unmask_prob is None else self.unmask_prob.to(device)
        return NoiseLevel(self.t.to(device), self.alpha.to(device), unmask_prob, self.weight.to(device))


def validate_steps(steps: int) -> None:
    """Raise ValueError unless `steps` is a sensible number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"steps must be a whole number; got {steps!r}, a {type(steps).__name__}")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must be a whole number from 1 to {MAX_STEPS:,}; got {steps:,}")


def alpha_grid(schedule: Schedule, steps: int) -> Float64[Tensor, " points"]:
    """alpha at t = 0, 1/T, ..., 1, float64 [T + 1], with the ends set to exactly 1 and 0."""
    validate_steps(steps)
    alpha = schedule.alpha(torch.linspace(0, 1, steps + 1, dtype=torch.float64))
    alpha[0], alpha[-1] = 1, 0
    return alpha


def discrete_level(schedule: Schedule, steps: int, u: Float64[Tensor, " B #L"]) -> NoiseLevel:
    """One of T steps, from t = i/T to s = (i - 1)/T, with weight T r for the unmasking probability r."""
    alpha = alpha_grid(schedule, steps).to(u.device)
    i = (u * steps).long().clamp(max=steps - 1) + 1
    r = Masking.unmask_prob(alpha[i - 1], alpha[i])
    return NoiseLevel(t=i.double() / steps, alpha=alpha[i], unmask_prob=r, weight=steps * r)


def continuous_level(schedule: Schedule, u: Float64[Tensor, " B #L"]) -> NoiseLevel:
    """A time of continuous time: u in [0, 1] falls into the reconstruction, the diffusion or the prior term.

    In the diffusion term the weight is that of the schedule at t; in the other two t is fixed, alpha is 1 - u
    and the weight 1/u (see the module's docstring).
    """
    start, end = schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64))  # scalars on the host
    reconstruction, diffusion = 1 - start, start - end
    t = ((u - reconstruction) / diffusion).clamp(0, 1)
    in_diffusion = (u >= reconstruction) & (u < reconstruction + diffusion)
    return NoiseLevel(
        t=t,
        alpha=torch.where(in_diffusion, schedule.alpha(t), 1 - u),
        unmask_prob=None,
        weight=torch.where(in_diffusion, schedule.weight(t) / diffusion, 1 / u.clamp(min=1e-12)),
    )


def fixed_count_level(schedule: Schedule, u: Float64[Tensor, "B 1"], loss_mask: Bool[Tensor, "B L"]) -> NoiseLevel:
    """The level at which exactly k of a sequence's n tokens (of `loss_mask`) are masked, k uniform in 1, ..., n.

    For a network without time conditioning, the integral of the weight over all times at which k of n tokens
    are masked is 1/k, whatever the schedule. The bound is the sum over k of (1/k) E[nats of k masked tokens],
    so a masked token has weight n/k. Use with `rank_uniform` noise; t is the time at which alpha(t) = 1 - u.
    """
    n = loss_mask.sum(1, keepdim=True)
    k = ((u * n).long() + 1).minimum(n)
    alpha = 1 - k.double() / n.clamp(min=1)
    return NoiseLevel(t=schedule.inverse(1 - u), alpha=alpha, unmask_prob=None, weight=n / k.clamp(min=1))


def rank_uniform(uniform: Float64[Tensor, "B L"], loss_mask: Bool[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Each token's rank (0.5, 1.5, ...)/n among the sequence's uniform numbers: exactly k are below k/n."""
    rank = torch.where(loss_mask, uniform, torch.inf).argsort(1).argsort(1)
    return (rank + 0.5) / loss_mask.sum(1, keepdim=True).clamp(min=1)
