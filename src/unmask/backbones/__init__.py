"""Networks. They know tokens and times, and nothing of diffusion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.backbones.base import Backbone as Backbone
    from unmask.backbones.base import BackboneConfig as BackboneConfig
    from unmask.backbones.dit import DiTConfig as DiTConfig
    from unmask.backbones.hf import HFBackboneConfig as HFBackboneConfig

BACKBONES: Family[BackboneConfig] = Family(
    "unmask.backbones.base:BackboneConfig",
    {
        "dit": "unmask.backbones.dit:DiTConfig",
        "hf": "unmask.backbones.hf:HFBackboneConfig",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, BACKBONES, Backbone="base", BackboneConfig="base")
