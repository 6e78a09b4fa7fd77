"""D3PM with an absorbing state: masked diffusion without the SUBS parameterization.

On masked tokens, with x_m and x_x the network's probabilities of the mask and of the clean token:

    T [ (a_s - a_t)/(1 - a_t) log((a_t x_m + 1 - a_t)/((1 - a_t) x_x))
        + (1 - a_s)/(1 - a_t) log((1 - a_s)(a_t x_m + 1 - a_t)/((1 - a_t)(a_s x_m + 1 - a_s))) ]

and -log x_theta(x | z_0) for the reconstruction. The shared formula of `objectives/base.py` gives the bracket for
the `log_probs` below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.objectives.base import SteppedObjective
from unmask.objectives.mdlm import without_mask
from unmask.ops.chunked_head import to_float32
from unmask.types import LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class D3PM(SteppedObjective):
    """The network may predict the mask, and visible tokens are not copied in the reconstruction loss."""

    steps: int | None = 1000
    """The number of steps T; None for continuous time."""
    carry_over: bool = False
    """Copy visible tokens. If off, the network is also trained to predict the visible tokens of z_0 (samplers
    copy them in any case)."""

    @property
    def normalized(self) -> bool:
        return False

    @property
    def depends_on_alpha(self) -> bool:
        return True

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """log_x of p(z_s | z_t) = q(z_s | z_t, x_theta), where x_theta has probability x_m on the mask.

        The posterior's normaliser, 1 - alpha + alpha x_m, divides the probability of unmasking each token v:
        log_x[v] = log x_theta[v] - log(1 + x_m alpha/(1 - alpha)).
        """
        log_p = to_float32(logits).log_softmax(-1)
        mask_prob = log_p[:, vocab.mask_id, None].exp()
        return without_mask(log_p - torch.log1p(mask_prob * (alpha / (1 - alpha)).to(log_p)), vocab)
