"""Uniform noise that belongs to a row: a function of (seed, draw), of nothing else.

Because no generator is shared between rows, a row's noise is the same alone, in any batch, on any
rank, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEED_BITS = 64
"""User seeds are below 2^64; the upper half of Philox's 128-bit key tells streams of one seed apart."""


def substream(seed: int, stream: int) -> int:
    """The seed of stream number `stream` of `seed`: stream 0 is the seed itself."""
    return (seed % (1 << SEED_BITS)) | (stream << SEED_BITS)


def uniforms(seeds: Sequence[int], size: int, draw: int = 0) -> Tensor:
    """float64 [len(seeds), size] in [0, 1): row b depends on `seeds[b]` and `draw`.

    Philox is counter-based: the key is the seed, the counter's top word is the draw.
    """
    out = np.empty((len(seeds), size))
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    state = bits.state  # re-keying one generator is five times cheaper than building one a row
    fresh = int(state["buffer_pos"])
    for row, seed in enumerate(seeds):
        state["state"]["key"][:] = (seed % (1 << SEED_BITS), seed >> SEED_BITS)
        state["state"]["counter"][:] = (0, 0, 0, draw)
        state["buffer_pos"] = fresh
        bits.state = state
        generator.random(out=out[row])
    return torch.from_numpy(out)
