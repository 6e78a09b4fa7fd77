"""Where the calls of several requests are in a merged one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MergedRows:
    """Which sequences of a merged call are those of each call, of `shapes` (B, n), and which tokens are padding."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.shapes = shapes
        ends = np.cumsum([num for num, _ in shapes]).tolist()
        self.slices = [slice(end - num, end) for end, (num, _) in zip(ends, shapes, strict=True)]
        self.lengths: NDArray[np.int64] = self.per_sequence([length for _, length in shapes])
        longest = int(self.lengths.max())
        padded = bool((self.lengths < longest).any())
        self.valid: NDArray[np.bool_] | None = np.arange(longest) < self.lengths[:, None] if padded else None

    def per_sequence(self, values: Any) -> NDArray[np.int64]:
        """Values [calls, ...] of each call, for each of its sequences [B, ...]."""
        return np.repeat(np.asarray(values, dtype=np.int64), [num for num, _ in self.shapes], axis=0)
