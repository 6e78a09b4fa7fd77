"""MDLM: masked diffusion language models (arXiv 2406.07524).

    NELBO = E_t E_q(z_t | x) [ -alpha'_t / (1 - alpha_t) * sum over masked positions l of -log x_theta(x_l | z_t) ]

in continuous time; in T steps with weight T (alpha_s - alpha_t)/(1 - alpha_t) at times t = i/T, s = (i - 1)/T.
The loss is `MaskedObjective.nll_and_level`, in the order of this equation: sample a noise level, corrupt, query
the network at the masked positions, weight the negative log-likelihoods. `examples/mdlm_reference.py` is all of
MDLM in plain torch (network, loss, sampler), and a test checks that its loss is the same.

The paper's ablations of SUBS are `MDLM(carry_over=False)`, `D3PM(steps=None, carry_over=True)` (without zero
masking) and `D3PM(steps=None)` (without both).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unmask.objectives.base import SteppedObjective
from unmask.ops.chunked_head import to_float32
from unmask.types import LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class MDLM(SteppedObjective):
    """The SUBS parameterization: no probability on the mask (zero masking), visible tokens are copied (carry-over)."""

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)


def subs(logits: Float[Tensor, "N V"], vocab: Vocab) -> LogX:
    """log_softmax over the clean tokens: the mask's logit is -inf."""
    return without_mask(to_float32(logits), vocab).log_softmax(-1)


def without_mask(logits: Float[Tensor, "*N V"], vocab: Vocab) -> Float[Tensor, "*N V"]:
    """Logits or log-probabilities [..., V] with -inf in the column of the mask."""
    return logits.index_fill(-1, torch.tensor([vocab.mask_id], device=logits.device), -torch.inf)
