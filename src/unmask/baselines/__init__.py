"""The continuous diffusion models that MDLM is compared with: SSD-LM and Plaid.

Their noisy text is vectors instead of tokens. Behind that they are an objective, a denoiser and a sampler like all
others: the same commands train, evaluate, sample, save and load them.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Any

from unmask.objectives import OBJECTIVES
from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.baselines._plaid import GaussianSteps as GaussianSteps
    from unmask.baselines._plaid import Plaid as Plaid
    from unmask.baselines._ssd_lm import SSDLM as SSDLM
    from unmask.baselines._ssd_lm import SimplexBlocks as SimplexBlocks

BASELINES: Family[Any] = Family(
    "unmask.objectives.base:Objective",
    {
        "ssd-lm": "unmask.baselines._ssd_lm:SSDLM",
        "plaid": "unmask.baselines._plaid:Plaid",
    },
    extends=OBJECTIVES,
)

EVERY_OBJECTIVE: ChainMap[str, Any] = ChainMap(BASELINES, OBJECTIVES)
"""What `unmask train --objective` takes."""

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, BASELINES, GaussianSteps="_plaid", SimplexBlocks="_ssd_lm")
