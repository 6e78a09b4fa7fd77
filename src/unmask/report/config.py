"""How much work a report is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportConfig:
    """How much is measured and generated for a report."""

    windows: int = 80
    """Held-out windows that are scored for the headline."""
    replicates: int = 4
    """Draws of times and noise for each of them."""
    sweep_windows: int = 16
    """Held-out windows on which the bounds of T-step samplers are compared."""
    sweep_replicates: int = 8
    """Draws of times and noise for each of those, and for each T."""
    samples: int = 4
    """Texts to generate."""
    steps: int = 64
    """Sampling steps of each text."""
    seed: int = 0
    """The seed of all draws and samples."""

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("sweep_windows", 1), ("samples", 1), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("replicates", "sweep_replicates"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, so that there is a standard error")
