"""A control variate: the luck of which tokens a draw hid, as far as it can be told.

A draw hides k of a row's n tokens and counts each n/k times, so it is dear if it happened to hide dear ones.
How dear a token is depends much on what it is, and u(x) = -log p(x | nothing visible) tells that before any
draw. So

    luck = (n/k) * sum over hidden tokens of u  -  sum over all tokens of u

goes with the nats of a draw, and is zero on average for every k, whatever u is: nats - beta * luck has the
same mean for every beta, and less noise for the right ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike

CONTROL_VARIATE_BETA = 0.7
"""Fixed, because one that is fitted to few draws adds more noise than it takes away.

Best were 0.7 to 1 for characters and 1 to 1.2 for words; the better a model knows contexts, the less do
prices say. A choice below the best loses little, one of twice the best loses everything.
"""
_MAX_NATS = 30.0
"""Of prices in nats: what a network thinks impossible must not count infinitely."""


@torch.no_grad()
def unconditional_nll(denoiser: DenoiserLike, length: int, device: torch.device) -> Tensor:
    """u [V]: what each token costs in the middle of nothing but masks."""
    z = torch.full((1, length), denoiser.vocab.mask_id, device=device)
    middle = torch.zeros_like(z, dtype=torch.bool)
    middle[0, length // 2] = True
    log_x = denoiser(z, torch.ones(1, 1, dtype=torch.float64, device=device), middle)[0]
    return (-log_x.double()).clamp(max=_MAX_NATS)


def control_variate(u: Tensor, masked: Tensor, loss_mask: Tensor) -> Tensor:
    """Each token's share [B, L] of the luck of its row, from prices u [B, L] of the tokens."""
    n, k = (flags.sum(1, keepdim=True).double() for flags in (loss_mask, masked))
    return n / k.clamp(min=1) * u * masked - u * loss_mask
