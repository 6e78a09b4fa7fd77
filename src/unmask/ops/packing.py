"""Rows [N, ...] of some positions of a batch [B, L, ...]: those that are not padding, or those that are queried.

The plain way, taken where `if_sparse` gives None, is to compute all positions and to pick some at the end.
"""

from __future__ import annotations

from torch import Tensor

from unmask.ops.switch import fast_paths_enabled

_MAX_DENSITY = 7 / 8
"""Padding is packed away only if at most this fraction of all positions is valid."""


class PackedTokens:
    """The T valid positions of a batch with padding, as rows [T, ...]: layers cost nothing on padding."""

    def __init__(self, valid: Tensor) -> None:
        self.shape = valid.shape
        self.sequence, position = valid.nonzero(as_tuple=True)
        self.flat_position = self.sequence * valid.shape[1] + position
        # No query attends to padding, so any row may stand there: the last valid one before it.
        self.packed_index = (valid.flatten().cumsum(0) - 1).clamp(min=0)

    @classmethod
    def if_sparse(cls, valid: Tensor) -> PackedTokens | None:
        """None if there is too little padding for packing to pay off, or nothing but padding."""
        if not fast_paths_enabled():
            return None
        return cls(valid) if 0 < int(valid.sum()) <= _MAX_DENSITY * valid.numel() else None

    def pack(self, values: Tensor) -> Tensor:
        """values[valid] [T, ...] of values [B, 1 or L, ...]."""
        if values.shape[1] == 1:
            return values[:, 0].index_select(0, self.sequence)
        return values.flatten(0, 1).index_select(0, self.flat_position)

    def unpack(self, packed: Tensor) -> Tensor:
        """[B, L, ...] with rows [T, ...] at the valid positions, and arbitrary rows elsewhere."""
        return packed.index_select(0, self.packed_index).view(*self.shape, *packed.shape[1:])


class SelectedPositions:
    """The N queried positions of a batch, from booleans [B, L]: the last layer computes only these.

    Their number differs between sequences, so their queries are padded to [B, M], M being the most of any
    sequence.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.sequence, self.position = positions.nonzero(as_tuple=True)
        self.slot = positions.cumsum(1)[positions] - 1
        self.max_selected = max(1, int(positions.sum(1).max()))

    @classmethod
    def if_sparse(cls, positions: Tensor) -> SelectedPositions | None:
        """None if all positions are queried."""
        return cls(positions) if fast_paths_enabled() and not bool(positions.all()) else None

    def select(self, values: Tensor) -> Tensor:
        """values[positions] [N, ...] of values [B, 1 or L, ...]."""
        return values[self.sequence, self.position if values.shape[1] > 1 else 0]

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """[B, M, ...] with values [N, ...] in the first slots of their sequences."""
        out = values.new_full((len(self.positions), self.max_selected, *values.shape[1:]), fill)
        return out.index_put((self.sequence, self.slot), values)

    def unpad(self, padded: Tensor) -> Tensor:
        """[N, ...] from the slots of [B, M, ...]."""
        return padded[self.sequence, self.slot]
