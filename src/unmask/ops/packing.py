"""Rows [N, ...] of some positions of a batch [B, L, ...]: those that are not padding, or those that are queried.

The plain way, taken where `if_sparse` gives None, is to compute all positions and to pick some at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from unmask.ops.switch import fast_paths_enabled
from unmask.types import Queries

_MAX_DENSITY = 7 / 8
"""Padding is packed away only if at most this fraction of all positions is valid."""


class PackedTokens:
    """The T valid positions of a batch with padding, as rows [T, ...]: layers cost nothing on padding."""

    def __init__(self, valid: Bool[Tensor, "B L"], indices: Queries) -> None:
        self.shape = valid.shape
        self.sequence, position = indices
        self.flat_position = self.sequence * valid.shape[1] + position
        # No query attends to padding, so any row may stand there: the last valid one before it.
        self.packed_index = (valid.flatten().cumsum(0) - 1).clamp(min=0)

    @classmethod
    def if_sparse(cls, valid: Bool[Tensor, "B L"], indices: Queries) -> PackedTokens | None:
        """None if there is too little padding for packing to pay off, or nothing but padding.

        `indices` are those of the valid positions.
        """
        sparse = 0 < len(indices[0]) <= _MAX_DENSITY * valid.numel()
        return cls(valid, indices) if sparse and fast_paths_enabled() else None

    def pack(self, values: Shaped[Tensor, " B #L *features"]) -> Shaped[Tensor, " T *features"]:
        """values[valid] [T, ...] of values [B, 1 or L, ...]."""
        if values.shape[1] == 1:
            return values[:, 0].index_select(0, self.sequence)
        return values.flatten(0, 1).index_select(0, self.flat_position)

    def unpack(self, packed: Shaped[Tensor, " T *features"]) -> Shaped[Tensor, "B L *features"]:
        """[B, L, ...] with rows [T, ...] at the valid positions, and arbitrary rows elsewhere."""
        return packed.index_select(0, self.packed_index).view(*self.shape, *packed.shape[1:])


class SelectedPositions:
    """The N queried positions of a batch: the last layer computes only these.

    Their number differs between sequences, so their queries are padded to [B, M], M being the most of any
    sequence.
    """

    def __init__(self, queries: Queries) -> None:
        self.sequence, self.position = queries
        self.batch_size, self.max_selected = queries.shape[0], max(1, queries.max_count)
        first = queries.counts.cumsum(0) - queries.counts
        self.slot = torch.arange(len(self.sequence), device=self.sequence.device) - first[self.sequence]

    @classmethod
    def if_sparse(cls, queries: Queries) -> SelectedPositions | None:
        """None if all positions are queried."""
        return cls(queries) if fast_paths_enabled() and not queries.is_everything else None

    def select(self, values: Shaped[Tensor, " B #L *features"]) -> Shaped[Tensor, " N *features"]:
        """values[positions] [N, ...] of values [B, 1 or L, ...]."""
        return values[self.sequence, self.position if values.shape[1] > 1 else 0]

    def pad(self, values: Shaped[Tensor, " N *features"], fill: float = 0) -> Shaped[Tensor, "B M *features"]:
        """[B, M, ...] with values [N, ...] in the first slots of their sequences."""
        out = values.new_full((self.batch_size, self.max_selected, *values.shape[1:]), fill)
        return out.index_put((self.sequence, self.slot), values)

    def unpad(self, padded: Shaped[Tensor, "B M *features"]) -> Shaped[Tensor, " N *features"]:
        """[N, ...] from the slots of [B, M, ...]."""
        return padded[self.sequence, self.slot]


def scatter_rows(values: Tensor, queries: Queries) -> Tensor:
    """[B, L] with values [N] at the queried positions and zero elsewhere."""
    apply: Any = _ScatterRows.apply
    scattered: Tensor = apply(values, queries)
    return scattered


def is_expanded_scalar(values: Tensor) -> bool:
    """Whether all entries are one number in memory, as in the gradient of a sum: known without reading any."""
    return all(size == 1 or stride == 0 for size, stride in zip(values.shape, values.stride(), strict=True))


class _ScatterRows(torch.autograd.Function):
    """`index_put`, but the gradient of a sum stays an expanded scalar, which `chunked_head` need not read."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, queries: Queries) -> Tensor:
        ctx.queries = queries
        return values.new_zeros(queries.shape).index_put((queries[0], queries[1]), values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,), queries = grad_outputs, ctx.queries
        if grad.numel() and is_expanded_scalar(grad):
            return grad[0, :1].expand(len(queries[0])), None
        return grad[queries[0], queries[1]], None
