"""Networks. They know tokens and times, and nothing of diffusion."""

from __future__ import annotations

from typing import TypeAlias

from unmask.backbones.dit import DiTConfig
from unmask.backbones.hf import HFBackboneConfig

AnyBackbone: TypeAlias = DiTConfig | HFBackboneConfig
