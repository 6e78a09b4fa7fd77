"""Sequences that differ in length, or in where they are asked: lines [N, ...] of rectangles [B, L, ...]."""

from __future__ import annotations

from torch import Tensor

_MAX_DENSITY = 7 / 8
"""Where more than this share of the places is no padding, it stays."""


class PackedTokens:
    """Lines of the places that are not padding, T in all: what is done to lines costs nothing elsewhere."""

    def __init__(self, valid: Tensor) -> None:
        self.shape = valid.shape
        self.sequence, position = valid.nonzero(as_tuple=True)
        self.flat_position = self.sequence * valid.shape[1] + position
        # Nobody looks at padding, so any line may stand there, as the last one before it.
        self.packed_index = (valid.flatten().cumsum(0) - 1).clamp(min=0)

    @classmethod
    def if_sparse(cls, valid: Tensor) -> PackedTokens | None:
        """None where there is so little padding that leaving it out does not pay, or nothing else."""
        return cls(valid) if 0 < int(valid.sum()) <= _MAX_DENSITY * valid.numel() else None

    def pack(self, values: Tensor) -> Tensor:
        """[T, ...] of values [B, 1 or L, ...]."""
        if values.shape[1] == 1:
            return values[:, 0].index_select(0, self.sequence)
        return values.flatten(0, 1).index_select(0, self.flat_position)

    def unpack(self, packed: Tensor) -> Tensor:
        """[B, L, ...] of lines [T, ...]."""
        return packed.index_select(0, self.packed_index).view(*self.shape, *packed.shape[1:])


class SelectedPositions:
    """The positions that a network is asked at: `rows` [B, L] booleans, N of them in all.

    Their number differs from sequence to sequence, so queries of theirs stand in [B, M] places, M being the
    most of any sequence.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.sequence, self.position = positions.nonzero(as_tuple=True)
        self.slot = positions.cumsum(1)[positions] - 1
        self.max_selected = max(1, int(positions.sum(1).max()))

    def select(self, values: Tensor) -> Tensor:
        """[N, ...] of values [B, 1 or L, ...]."""
        return values[self.sequence, self.position if values.shape[1] > 1 else 0]

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """[B, M, ...] with values [N, ...] in their places."""
        out = values.new_full((len(self.positions), self.max_selected, *values.shape[1:]), fill)
        return out.index_put((self.sequence, self.slot), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """[N, ...] from their places in [B, M, ...]."""
        return padded[self.sequence, self.slot]
