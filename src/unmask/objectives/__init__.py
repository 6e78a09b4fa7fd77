"""Losses: each reads a network's logits as log_x and charges nats per token, a bound on -log p."""

from __future__ import annotations

from typing import TypeAlias

from unmask.objectives.block_diffusion import BlockDiffusion
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.objectives.next_token import NextToken
from unmask.objectives.sedd import SEDD
from unmask.objectives.uniform_diffusion import UniformDiffusion

AnyObjective: TypeAlias = MDLM | D3PM | SEDD | UniformDiffusion | NextToken | BlockDiffusion

__all__ = [
    "D3PM",
    "MDLM",
    "SEDD",
    "AnyObjective",
    "BlockDiffusion",
    "NextToken",
    "UniformDiffusion",
]
