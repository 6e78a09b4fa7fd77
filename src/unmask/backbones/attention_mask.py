"""Which keys a query attends to, and the position of each token: worked out once for all layers of a call.

Keys are those of cached positions and those of the call's own tokens. Padding, documents and attention
stages restrict them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.backbones.cache import kv_view
from unmask.context import AttentionStages, Context
from unmask.ops.checks import holds
from unmask.types import Queries

FLEX_DEVICES = frozenset({"cuda"})
"""Devices on which flex attention has a backward pass."""


@dataclass(frozen=True)
class AttentionLayout:
    """What the n queries of a call attend to, among K keys: the cached ones, and then the call's own.

    R is 1 if all sequences stand at the same positions, and else B.
    """

    mask: Tensor | None
    """bool [B or 1, 1, n or 1, K]; None if all queries attend to all keys, or if the attention is causal."""
    position_ids: Tensor
    """int64 [n] or, where sequences differ, [B, n]: the position ids that the network gets."""
    query_positions: Tensor
    """int64 [R, n]: positions of the call's tokens in the text."""
    key_positions: Tensor
    """int64 [R, K]: positions of the keys in the text; `_PADDING_POSITION` on padding of merged calls."""
    shared_mask: Tensor | None
    """bool [R, n, K]: the part of the mask that depends on positions and stages alone."""
    valid: Tensor | None
    """bool [B, K]: False on padding."""
    document_ids: Tensor | None
    """int64 [B, positions of the text]."""
    num_before: int
    """The number of cached keys, which come before the call's own."""
    first_position: int
    """The smallest of the query positions."""
    last_position: int
    """The largest of the query positions."""

    def relative_keys(self, offset: int) -> tuple[Tensor, Tensor]:
        """For each query, the key [R, n] at its position + `offset`, and whether it may attend to it [B or 1, n]."""
        matches = self.key_positions[:, None] == self.query_positions[..., None] + offset
        if self.shared_mask is not None:
            matches = matches & self.shared_mask
        key, visible = matches.int().argmax(2), matches.any(2)
        if self.valid is not None:
            visible = visible & _at(self.valid, key)
        if self.document_ids is not None:
            query_document = _at(self.document_ids, self.query_positions)
            key_document = _at(self.document_ids, self.key_positions.gather(1, key))
            visible = visible & (query_document == key_document)
        return key, visible

    def shifted(self, queries: Queries) -> Tensor:
        """Where a network that predicts the next token is read [N]: the position before each queried one.

        The first token of a text has none before it, and is read at its own position.
        """
        key, visible = self.relative_keys(-1)
        itself = torch.arange(key.shape[1], device=key.device)
        source = torch.where(visible, key - self.num_before, itself)
        sequence, position = queries
        previous = source[sequence if len(source) > 1 else 0, position]
        if self.num_before and not holds(previous >= 0):
            raise ValueError("a network that predicts the next token must be given the token before a queried one")
        return previous

    @staticmethod
    def shifted_on_host(queries: Queries, context: Context) -> NDArray[np.bool_] | None:
        """`shifted` as booleans [B, L], where the host knows it; None elsewhere."""
        valid, others = context.valid_on_host, (context.stages, context.cache, context.document_ids)
        unknown = context.valid is not None and valid is None
        if queries.on_host is None or unknown or any(other is not None for other in others):
            return None
        sequence, position = queries.on_host.nonzero()
        previous = np.maximum(position - 1, 0)
        if valid is not None:
            previous = np.where(valid[sequence, previous], previous, position)
        shifted = np.zeros_like(queries.on_host)
        shifted[sequence, previous] = True
        return shifted


def attention_layout(
    length: int,
    device: torch.device,
    *,
    causal: bool,
    context: Context = Context(),
    left_padded: bool | None = None,
) -> AttentionLayout:
    """The attention of a call of `length` tokens.

    `left_padded`: whether any sequence begins with padding; None if that must be read from `context.valid`.
    """
    cache = kv_view(context)
    query = _query_positions(length, device, context)
    cached = None if cache is None else cache.key_positions(length, device)
    num_before = 0 if cached is None else cached.shape[1]
    query = query if cached is None else query.expand(max(len(query), len(cached)), -1)
    key = query if cached is None else torch.cat([cached.expand(len(query), -1), query], 1)
    valid = _valid_keys(context, cached, query)
    # The kernel has a faster way to be causal, if nothing else restricts the attention.
    plain_causal = causal and key is query and valid is None and _is_unrestricted(context)
    shared = None if plain_causal else _shared_mask(length, num_before, device, causal, context.stages)
    mask = _combine(
        None if shared is None else shared[:, None],
        None if valid is None else valid[:, None, None],
        _same_document(context.document_ids, query, key),
    )
    first, last = _span(length, context)
    return AttentionLayout(
        None if mask is None else _attend_to_itself(mask, num_before),
        _position_ids(query, context, left_padded),
        query,
        key,
        shared,
        valid,
        context.document_ids,
        num_before,
        first,
        last,
    )


def _is_unrestricted(context: Context) -> bool:
    return context.stages is None and context.document_ids is None


def _query_positions(length: int, device: torch.device, context: Context) -> Tensor:
    """int64 [R, n]."""
    if context.stages is not None:
        position = context.stages.position
        return position if position.ndim == 2 else position[None]
    cache = kv_view(context)
    return torch.arange(length, device=device)[None] if cache is None else cache.query_positions(length, device)


def _span(length: int, context: Context) -> tuple[int, int]:
    """The smallest and the largest position of a call's tokens."""
    cache, stages = kv_view(context), context.stages
    if cache is not None:
        return cache.span(length)
    return (
        (0, length - 1) if stages is None else (stages.first_position, stages.first_position + stages.num_positions - 1)
    )


def _valid_keys(context: Context, cached: Tensor | None, query: Tensor) -> Tensor | None:
    """bool [B, K]: which keys are text; None if all are. The calls of a merged one have no padding of their own."""
    if context.valid is not None:
        return _at(context.valid, query if cached is None else torch.cat([cached, query], 1))
    cache = kv_view(context)
    own = None if cache is None else cache.valid_on_host
    if cache is None or (own is None and not cache.pads_keys):
        return None
    new = torch.ones_like(query, dtype=torch.bool) if own is None else torch.from_numpy(own).to(query.device)
    return new if cached is None else torch.cat([cached >= 0, new], 1)


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """values [B or 1, L] at positions [R, n]."""
    return values[:, positions[0]] if len(positions) == 1 else values.gather(1, positions)


def _shared_mask(
    num_queries: int, num_before: int, device: torch.device, causal: bool, stages: AttentionStages | None
) -> Tensor | None:
    """bool [R, n, K], or None if all queries attend to all keys."""
    unrestricted = (not causal or num_queries == 1) if stages is None else stages.single_stage
    if unrestricted:
        return None
    if stages is None:
        own = torch.ones(1, num_queries, num_queries, dtype=torch.bool, device=device).tril()
    else:
        own = stages.mask().view(-1, num_queries, num_queries)
    return torch.nn.functional.pad(own, (num_before, 0), value=True)


def _same_document(document_ids: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if document_ids is None:
        return None
    return _at(document_ids, query)[:, None, :, None] == _at(document_ids, key)[:, None, None]


def _combine(*masks: Tensor | None) -> Tensor | None:
    """The conjunction of masks, of which None allows everything."""
    combined: Tensor | None = None
    for mask in masks:
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined


def _attend_to_itself(mask: Tensor, num_before: int) -> Tensor:
    """The mask, except that padding, which may attend to nothing else, attends to itself."""
    num_queries = mask.shape[2]
    if num_queries == 1:
        return mask
    own = torch.arange(num_queries, device=mask.device)
    mask = mask.clone()
    mask[:, :, own, num_before + own] = True
    return mask


def _position_ids(positions: Tensor, context: Context, left_padded: bool | None) -> Tensor:
    """Positions, counted from the end of the padding on the left."""
    valid, known = context.valid, context.valid_on_host
    if valid is None:
        return positions[0] if len(positions) == 1 else positions
    if left_padded is None:
        left_padded = not bool(valid[:, 0].all() if known is None else known[:, 0].all())
    if not left_padded:
        return positions[0]
    padding = (~valid).long().cumprod(1).sum(1, keepdim=True)
    return (positions - padding).clamp(min=0)


def flex_block_mask(mask: Tensor) -> Any:
    """The mask for flex attention, which skips blocks that are all False: half of a two-stream mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, _, num_queries, num_keys = mask.shape

    def attends(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[sequence if batch > 1 else 0, 0, query, key]

    return create_block_mask(attends, batch if batch > 1 else None, None, num_queries, num_keys, device=mask.device)
