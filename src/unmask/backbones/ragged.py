"""Sequences that differ in length, or in where they are asked: lines [N, ...] of rectangles [B, L, ...]."""

from __future__ import annotations

from torch import Tensor

MOST_KEPT = 7 / 8
"""Where more than this share of the places is no padding, it stays."""


class Packed:
    """Lines of the places that are not padding, T in all: what is done to lines costs nothing elsewhere."""

    def __init__(self, kept: Tensor) -> None:
        self.shape = kept.shape
        self.sequence, position = kept.nonzero(as_tuple=True)
        self.place = self.sequence * kept.shape[1] + position
        # Nobody looks at padding, so any line may stand there, as the last one before it.
        self.line = (kept.flatten().cumsum(0) - 1).clamp(min=0)

    @classmethod
    def where(cls, kept: Tensor) -> Packed | None:
        """None where there is so little padding that leaving it out does not pay, or nothing else."""
        return cls(kept) if 0 < int(kept.sum()) <= MOST_KEPT * kept.numel() else None

    def of(self, values: Tensor) -> Tensor:
        """[T, ...] of values [B, 1 or L, ...]."""
        if values.shape[1] == 1:
            return values[:, 0].index_select(0, self.sequence)
        return values.flatten(0, 1).index_select(0, self.place)

    def spread(self, lines: Tensor) -> Tensor:
        """[B, L, ...] of lines [T, ...]."""
        return lines.index_select(0, self.line).view(*self.shape, *lines.shape[1:])


class Asked:
    """The positions that a network is asked at: `rows` [B, L] booleans, N of them in all.

    Their number differs from sequence to sequence, so queries of theirs stand in [B, M] places, M being the
    most of any sequence.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.sequence, self.position = rows.nonzero(as_tuple=True)
        self.place = rows.cumsum(1)[rows] - 1
        self.most = max(1, int(rows.sum(1).max()))

    def of(self, values: Tensor) -> Tensor:
        """[N, ...] of values [B, 1 or L, ...]."""
        return values[self.sequence, self.position if values.shape[1] > 1 else 0]

    def placed(self, values: Tensor, elsewhere: float = 0) -> Tensor:
        """[B, M, ...] with values [N, ...] in their places."""
        out = values.new_full((len(self.rows), self.most, *values.shape[1:]), elsewhere)
        return out.index_put((self.sequence, self.place), values)

    def taken(self, placed: Tensor) -> Tensor:
        """[N, ...] from their places in [B, M, ...]."""
        return placed[self.sequence, self.place]
