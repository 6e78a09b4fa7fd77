"""A pseudo-random order of rows that is computed, not stored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unmask.data.corpus._token_files import IntArray


def feistel_permutation(index: IntArray, size: int, key: int) -> IntArray:
    """The image of each index under a pseudo-random permutation of 0, ..., size - 1.

    Four Feistel rounds permute the next power of four; an image outside the range is permuted again until it is
    inside (cycle walking).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    value = index.astype(np.uint64)
    pending = np.ones(len(value), dtype=bool)
    while pending.any():
        left, right = value[pending] >> np.uint64(half), value[pending] & low
        for round_ in range(4):
            mixed = _splitmix64(right + np.uint64((key + round_ * 0x9E37) % 2**63))
            left, right = right, left ^ (mixed & low)
        value[pending] = (left << np.uint64(half)) | right
        pending &= value >= np.uint64(size)
    return value.astype(np.int64)


def derive_key(seed: int, epoch: int) -> int:
    """A 64-bit key for an epoch."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def row_uniform(index: IntArray, key: int) -> NDArray[np.float64]:
    """A pseudo-random number in [0, 1) for each index, a function of the index and the key."""
    mixed = _splitmix64(index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
