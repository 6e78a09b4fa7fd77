"""The maths: schedules, processes, times, exact categorical draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.diffusion.schedule import Cosine as Cosine
    from unmask.diffusion.schedule import CosineSquared as CosineSquared
    from unmask.diffusion.schedule import Geometric as Geometric
    from unmask.diffusion.schedule import Hyperbolic as Hyperbolic
    from unmask.diffusion.schedule import IntegratedRate as IntegratedRate
    from unmask.diffusion.schedule import LinearSigma as LinearSigma
    from unmask.diffusion.schedule import LogLinear as LogLinear
    from unmask.diffusion.schedule import Polynomial as Polynomial
    from unmask.diffusion.schedule import Schedule as Schedule

SCHEDULES: Family[Schedule] = Family(
    "unmask.diffusion.schedule:Schedule",
    {
        "log-linear": "unmask.diffusion.schedule:LogLinear",
        "cosine": "unmask.diffusion.schedule:Cosine",
        "cosine-squared": "unmask.diffusion.schedule:CosineSquared",
        "geometric": "unmask.diffusion.schedule:Geometric",
        "linear-sigma": "unmask.diffusion.schedule:LinearSigma",
        "polynomial": "unmask.diffusion.schedule:Polynomial",
        "hyperbolic": "unmask.diffusion.schedule:Hyperbolic",
        "integrated-rate": "unmask.diffusion.schedule:IntegratedRate",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(__name__, SCHEDULES, Schedule="schedule")
