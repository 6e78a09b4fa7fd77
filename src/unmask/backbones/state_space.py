"""The settings that all state-space networks have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unmask.backbones.base import BlockStackConfig

_MAX_LENGTH, _MAX_SIZE = 1 << 30, 1 << 12
"""No network needs more; larger numbers are mistakes or attacks."""


@dataclass(frozen=True)
class StateSpace:
    """Sizes of the recurrence in a block of Mamba."""

    state_size: int = 16
    """Numbers that each channel remembers."""
    kernel_size: int = 4
    """Tokens of the convolution before the recurrence: this one and those before it."""
    expand: int = 2
    """Channels of the recurrence, as a multiple of the width."""
    dt_rank: int | None = None
    """Rank of the projection to the time steps; None is a sixteenth of the width, rounded up."""
    dt_min: float = 0.001
    """The smallest time step of a new network."""
    dt_max: float = 0.1
    """The largest time step of a new network."""

    def __post_init__(self) -> None:
        for name in ("state_size", "kernel_size", "expand", "dt_rank"):
            size = getattr(self, name)
            if size is not None:
                require(1 <= size <= _MAX_SIZE, f"{name} must be from 1 to {_MAX_SIZE:,}; got {size:,}")
        require(
            0 < self.dt_min <= self.dt_max < math.inf,
            f"time steps need 0 < dt_min <= dt_max; got dt_min={self.dt_min} and dt_max={self.dt_max}",
        )


def require(condition: bool, message: str) -> None:
    """Refuse a setting."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class SSMConfig(BlockStackConfig):
    """What the settings of all state-space networks have."""

    width: int = 128
    """Width of the hidden states."""
    depth: int = 4
    """Number of blocks."""
    max_length: int | None = None
    """The longest sequence that the network takes; None if there is no limit."""
    state_space: StateSpace = StateSpace()
    """Sizes of the recurrence."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        require(self.width >= 1, f"width must be at least 1; got {self.width}")
        require(self.depth >= 1, f"depth must be at least 1; got {self.depth}")
        longest = self.max_length
        require(
            longest is None or 1 <= longest <= _MAX_LENGTH,
            f"max_length must be None, or from 1 to {_MAX_LENGTH:,}; got {longest}",
        )
        require(0 < self.norm_eps < 1, f"norm_eps must be above 0 and below 1; got {self.norm_eps}")
