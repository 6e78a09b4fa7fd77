"""SEDD: score entropy (arXiv 2310.16834). The network estimates ratios s_v = p(z with v)/p(z with mask).

With s_v = exp(log_x[v]) alpha/(1 - alpha), the score entropy times sigma'(t) is
weight(t) (-log_x[x] + S - 1): MDLM's loss plus a penalty for not being normalized.

On uniform noise the ratios are those to the present token, q_v = p(z with v)/p(z); there is no estimate of the clean
token, and the score entropy is the integrand of uniform diffusion, of any q (`UniformObjective`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float, Float64, Int
from torch import Tensor

from unmask.diffusion.process import UniformRatios
from unmask.diffusion.schedule import Geometric, Schedule
from unmask.objectives.base import MaskedObjective
from unmask.objectives.mdlm import without_mask
from unmask.objectives.uniform_diffusion import UniformObjective
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


@dataclass(frozen=True, kw_only=True)
class UniformSEDD(UniformObjective):
    """SEDD on uniform noise, in continuous time."""

    schedule: Schedule = Geometric()
    """The noise schedule alpha(t): P(a token is not replaced at time t)."""

    @property
    def process(self) -> UniformRatios:
        return UniformRatios(self.schedule)

    @property
    def normalized(self) -> bool:
        return False

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """log q_v; the column of the present token, whose ratio is 1, means nothing."""
        return without_mask(to_float32(logits), vocab)

    def log_ratios(
        self, z: Int[Tensor, " N"], log_x: LogX, pi: Float64[Tensor, " V"], alpha: Float64[Tensor, "N 1"]
    ) -> Float64[Tensor, "N V"]:
        return log_x.scatter(-1, z[:, None], 0.0)
