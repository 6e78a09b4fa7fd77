"""Networks. They know tokens and times, and nothing of diffusion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.backbones.base import Backbone as Backbone
    from unmask.backbones.base import BackboneConfig as BackboneConfig
    from unmask.backbones.caduceus import CaduceusConfig as CaduceusConfig
    from unmask.backbones.dimamba import DiMambaConfig as DiMambaConfig
    from unmask.backbones.dit import DiTConfig as DiTConfig
    from unmask.backbones.hf import HFBackboneConfig as HFBackboneConfig
    from unmask.backbones.mamba import MambaConfig as MambaConfig
    from unmask.backbones.mosaic_bert import MosaicBERTConfig as MosaicBERTConfig

BACKBONES: Family[BackboneConfig] = Family(
    "unmask.backbones.base:BackboneConfig",
    {
        "caduceus": "unmask.backbones.caduceus:CaduceusConfig",
        "dimamba": "unmask.backbones.dimamba:DiMambaConfig",
        "dit": "unmask.backbones.dit:DiTConfig",
        "hf": "unmask.backbones.hf:HFBackboneConfig",
        "mamba": "unmask.backbones.mamba:MambaConfig",
        "mosaic-bert": "unmask.backbones.mosaic_bert:MosaicBERTConfig",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, BACKBONES, Backbone="base", BackboneConfig="base")
