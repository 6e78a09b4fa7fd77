"""Uniform noise per row, as a function of (seed, draw) only.

No generator is shared between rows, so the noise of a row is the same alone, in any batch, on any rank, and
after resuming.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

_SEED_BITS = 64
"""User seeds are below 2^64; the upper half of Philox's 128-bit key holds the stream."""


def derive_seed(seed: int, stream: int) -> int:
    """The seed of stream number `stream` of `seed`: stream 0 is the seed itself."""
    return (seed % (1 << _SEED_BITS)) | (stream << _SEED_BITS)


class _ThreadGenerator(threading.local):
    """One generator per thread: setting its key is five times cheaper than building a generator."""

    def __init__(self) -> None:
        self.bit_generator = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bit_generator)
        self.state = self.bit_generator.state
        self.fresh_buffer_pos = int(self.state["buffer_pos"])


_GENERATOR = _ThreadGenerator()


def seeded_uniform(seeds: Sequence[int], size: int, draw: int = 0) -> Float64[Tensor, "B size"]:
    """float64 [len(seeds), size] in [0, 1): row b depends on `seeds[b]` and `draw`."""
    return torch.from_numpy(seeded_uniform_array(seeds, size, draw))


def seeded_uniform_array(seeds: Sequence[int], size: int, draw: int = 0) -> NDArray[np.float64]:
    """`seeded_uniform` as an array, for what is decided on the host.

    Philox is counter-based: the key is the seed, the counter's top word is the draw.
    """
    out = np.empty((len(seeds), size))
    bits, state = _GENERATOR.bit_generator, _GENERATOR.state
    for row, seed in enumerate(seeds):
        state["state"]["key"][:] = (seed % (1 << _SEED_BITS), seed >> _SEED_BITS)
        state["state"]["counter"][:] = (0, 0, 0, draw)
        state["buffer_pos"] = _GENERATOR.fresh_buffer_pos
        bits.state = state
        _GENERATOR.generator.random(out=out[row])
    return out
