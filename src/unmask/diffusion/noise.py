"""Uniform noise that belongs to a row: a function of (seed, draw), of nothing else.

Because no generator is shared between rows, a row's noise is the same alone, in any batch, on any
rank, and after a resume.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SEED_BITS = 64
"""User seeds are below 2^64; the upper half of Philox's 128-bit key tells streams of one seed apart."""


def substream(seed: int, stream: int) -> int:
    """The seed of stream number `stream` of `seed`: stream 0 is the seed itself."""
    return (seed % (1 << SEED_BITS)) | (stream << SEED_BITS)


class _Kept(threading.local):
    """A generator for each thread: re-keying one is five times cheaper than building one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.state = self.bits.state
        self.fresh = int(self.state["buffer_pos"])


_KEPT = _Kept()


def uniforms(seeds: Sequence[int], size: int, draw: int = 0) -> Tensor:
    """float64 [len(seeds), size] in [0, 1): row b depends on `seeds[b]` and `draw`.

    Philox is counter-based: the key is the seed, the counter's top word is the draw.
    """
    out = np.empty((len(seeds), size))
    bits, state = _KEPT.bits, _KEPT.state
    for row, seed in enumerate(seeds):
        state["state"]["key"][:] = (seed % (1 << SEED_BITS), seed >> SEED_BITS)
        state["state"]["counter"][:] = (0, 0, 0, draw)
        state["buffer_pos"] = _KEPT.fresh
        bits.state = state
        _KEPT.generator.random(out=out[row])
    return torch.from_numpy(out)
