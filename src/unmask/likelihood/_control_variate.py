"""A control variate for draws of masked diffusion, in which masked tokens have the weight w(t).

The nats of such a draw depend on how many tokens were masked and on which: some are harder to predict than others. How
hard a token is depends much on what it is, and u(x) = -log p(x | nothing visible) is known before any draw. So

    control = w(t) * ( sum over masked tokens of u  -  (1 - alpha(t)) * sum over all tokens of u )

correlates with the nats of a draw, and its mean is zero at every t, whatever u is: a token is masked with probability
1 - alpha(t). Hence nats - beta * control has the same mean for every beta, and less variance for a good one. Draws that
mask exactly k of n tokens have w = n/k and 1 - alpha = k/n.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import NoiseLevel

CONTROL_VARIATE_BETA = 0.7
"""Fixed, because a beta that is fitted to few draws adds more variance than it removes.

The best values were 0.7 to 1 for characters and 1 to 1.2 for words, and lower for better models, which depend more
on the context. A beta below the best one loses little; one of twice the best gains nothing at all.
"""
_MAX_NATS = 30.0
"""An upper limit for u, which is infinite for tokens that the network thinks impossible."""


@torch.no_grad()
def unconditional_nll(denoiser: DenoiserLike, length: int, device: torch.device) -> Float64[Tensor, " V"]:
    """u [V]: -log p of each token in the middle of a sequence of masks."""
    z = torch.full((1, length), denoiser.vocab.mask_id, device=device)
    middle = torch.zeros_like(z, dtype=torch.bool)
    middle[0, length // 2] = True
    log_x = denoiser(z, torch.ones(1, 1, dtype=torch.float64, device=device), middle)[0]
    return (-log_x.double()).clamp(max=_MAX_NATS)


def control_variate(
    u: Float64[Tensor, "B L"], masked: Bool[Tensor, "B L"], loss_mask: Bool[Tensor, "B L"], level: NoiseLevel
) -> Float64[Tensor, "B L"]:
    """The terms [B, L] of the control variate for each token, given u [B, L] of the tokens."""
    return level.weight * u * (masked.double() - (1 - level.alpha) * loss_mask)
