"""Normal noise per row, as a function of (seed, draw) only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from unmask.diffusion.noise import derive_seed, seeded_uniform
from unmask.types import Batch

_NORMAL_STREAM = 1
"""A word of the counter, so that these numbers share nothing with the uniform ones of the same seed and draw."""


def seeded_normal(seeds: Sequence[int], size: int, draw: int = 0) -> Float32[Tensor, "B size"]:
    """float32 [len(seeds), size], standard normal: row b depends on `seeds[b]` and `draw`."""
    out = np.empty((len(seeds), size), np.float32)
    for row, seed in enumerate(seeds):
        bits = np.random.Philox(key=seed, counter=(draw << 192) | (_NORMAL_STREAM << 128))
        np.random.Generator(bits).standard_normal(dtype=np.float32, out=out[row])
    return torch.from_numpy(out)


@dataclass(frozen=True)
class BlockNoise:
    """The random numbers of `size` positions from `start` on, step by step: functions of each row's seed."""

    seeds: Sequence[int]
    start: int
    size: int
    channels: int

    def normal(self, step: int) -> Float32[Tensor, "B size channels"]:
        """Standard normal numbers."""
        return seeded_normal(self.seeds, self.size * self.channels, self._draw(step)).view(
            len(self.seeds), self.size, self.channels
        )

    def uniform(self, step: int) -> Float64[Tensor, "B size"]:
        """Numbers in [0, 1)."""
        return seeded_uniform(self.seeds, self.size, self._draw(step))

    def _draw(self, step: int) -> int:
        return self.start << 32 | step


def row_seeds(batch: Batch, generator: torch.Generator) -> list[int]:
    """A seed for each row: a function of the generator's state and the row's index in the global batch."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return [derive_seed(seed, batch.row_offset + row) for row in range(len(batch.tokens))]
