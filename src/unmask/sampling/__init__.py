"""Reverse loops: a sampler is a frozen dataclass whose `run` yields the canvas after each step."""

from __future__ import annotations

from typing import TypeAlias

from unmask.sampling.ancestral import Ancestral, FirstHitting, RandomOrder
from unmask.sampling.autoregressive import Autoregressive
from unmask.sampling.blockwise import Blockwise
from unmask.sampling.confidence import Confidence, EntropyBounded, Factor, Threshold
from unmask.sampling.remdm import ReMDM
from unmask.sampling.semi_autoregressive import MASKED_SAMPLERS, SAMPLERS, SemiAutoregressive
from unmask.sampling.uniform import UniformAncestral

AnySampler: TypeAlias = (
    Ancestral
    | FirstHitting
    | RandomOrder
    | Confidence
    | Threshold
    | Factor
    | EntropyBounded
    | ReMDM
    | SemiAutoregressive
    | Blockwise
    | UniformAncestral
    | Autoregressive
)

__all__ = [
    "MASKED_SAMPLERS",
    "SAMPLERS",
    "Ancestral",
    "AnySampler",
    "Autoregressive",
    "Blockwise",
    "Confidence",
    "EntropyBounded",
    "Factor",
    "FirstHitting",
    "RandomOrder",
    "ReMDM",
    "SemiAutoregressive",
    "Threshold",
    "UniformAncestral",
]
