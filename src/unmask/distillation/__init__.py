"""Distillation: a student that starts as its teacher learns to sample in fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.distillation.base import Distillation as Distillation
    from unmask.distillation.confidence import ConfidenceDistillation as ConfidenceDistillation
    from unmask.distillation.dcd import DCD as DCD
    from unmask.distillation.sdtt import SDTT as SDTT

DISTILLATIONS: Family[Distillation] = Family(
    "unmask.distillation.base:Distillation",
    {
        "sdtt": "unmask.distillation.sdtt:SDTT",
        "dcd": "unmask.distillation.dcd:DCD",
        "confidence": "unmask.distillation.confidence:ConfidenceDistillation",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, DISTILLATIONS, Distillation="base")
