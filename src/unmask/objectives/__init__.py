"""Losses: each turns a network's logits into log_x and gives nats per token, a bound on -log p."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.objectives.base import Objective as Objective
    from unmask.objectives.block_diffusion import BlockDiffusion as BlockDiffusion
    from unmask.objectives.d3pm import D3PM as D3PM
    from unmask.objectives.flexmdm import FlexMDM as FlexMDM
    from unmask.objectives.genmd4 import GenMD4 as GenMD4
    from unmask.objectives.mdlm import MDLM as MDLM
    from unmask.objectives.mlm import MLM as MLM
    from unmask.objectives.next_token import NextToken as NextToken
    from unmask.objectives.sedd import SEDD as SEDD
    from unmask.objectives.sedd import UniformSEDD as UniformSEDD
    from unmask.objectives.uniform_diffusion import UniformDiffusion as UniformDiffusion

OBJECTIVES: Family[Objective] = Family(
    "unmask.objectives.base:Objective",
    {
        "mdlm": "unmask.objectives.mdlm:MDLM",
        "d3pm": "unmask.objectives.d3pm:D3PM",
        "sedd": "unmask.objectives.sedd:SEDD",
        "uniform": "unmask.objectives.uniform_diffusion:UniformDiffusion",
        "uniform-sedd": "unmask.objectives.sedd:UniformSEDD",
        "ar": "unmask.objectives.next_token:NextToken",
        "block": "unmask.objectives.block_diffusion:BlockDiffusion",
        "genmd4": "unmask.objectives.genmd4:GenMD4",
        "flexmdm": "unmask.objectives.flexmdm:FlexMDM",
        "mlm": "unmask.objectives.mlm:MLM",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, OBJECTIVES, Objective="base")
