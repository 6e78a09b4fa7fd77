"""SEDD: score entropy (arXiv 2310.16834). The network estimates ratios s_v = p(z with v)/p(z with mask).

With s_v = exp(log_x[v]) alpha/(1 - alpha), the score entropy times sigma'(t) is
weight(t) (-log_x[x] + S - 1): MDLM's loss plus a penalty for not being normalized.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from unmask.objectives.base import MaskedObjective
from unmask.objectives.mdlm import without_mask
from unmask.ops.chunked_head import to_float32
from unmask.types import LogX, Vocab


@dataclass(frozen=True, kw_only=True)
class SEDD(MaskedObjective):
    """Continuous time only: its reverse process has rates, not a T-step posterior."""

    @property
    def normalized(self) -> bool:
        return False

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """Logits minus log(V - 1): a network that outputs zeros starts at the uniform distribution."""
        return without_mask(to_float32(logits) - math.log(vocab.size - 1), vocab)
