"""Who looks at whom: padding, documents, text that is read in stages, and what was read before.

A network reads tokens beside keys and values that it keeps from earlier calls. What a query may look at, and
where a token stands, is worked out here once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.context import AttentionStages, Cache, CacheView, Context

FLEX_DEVICES = frozenset({"cuda"})
"""Devices on which flex attention has a backward pass."""


class KVCache(Cache):
    """Keys and values of places that were read before, one pair a layer; `first` is the place of the first.

    Sequences may be dropped when they have ended, and the oldest places when there are too many.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.embeddings: Tensor | None = None
        self.start = 0

    @property
    def end(self) -> int:
        """The place after the last that is held."""
        return self.start + (self.layers[-1][0].shape[-2] if self.layers else 0)

    def view(
        self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None
    ) -> KVCacheView:
        """A call whose tokens stand at `start` (after all that is held, if None); the first `keep` of them
        (all, if None) are held from then on. `rows` are its sequences among those held."""
        return KVCacheView(self, self.end if start is None else start, keep, sequence_ids)

    def select(self, sequence_ids: Tensor) -> None:
        """Go on with these sequences."""
        self._map(lambda held: held[sequence_ids])

    def evict_before(self, position: int) -> None:
        """Drop the places before this one."""
        places = slice(max(0, position - self.start), None)
        self._map(lambda held: held[..., places, :])
        self.start = max(self.start, position)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.layers = [(fn(keys), fn(values)) for keys, values in self.layers]
        self.embeddings = None if self.embeddings is None else fn(self.embeddings)


class KVCacheView(CacheView):
    """A call beside a cache: its tokens stand at the place `start` and those after it."""

    def __init__(self, kv_cache: KVCache, start: int, keep: int | None, sequence_ids: Tensor | None) -> None:
        self.kv_cache, self.keep, self.sequence_ids = kv_cache, keep, sequence_ids
        self._start = start

    @property
    def start(self) -> int:
        return self._start

    @property
    def cached_length(self) -> int:
        """Places in the cache."""
        return self.kv_cache.end - self.kv_cache.start

    def update(self, layer_index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, heads, K, d] that a layer looks at, the new ones [B, heads, n, d] in
        their place."""
        layers = self.kv_cache.layers
        if layer_index == len(layers):
            layers.append((keys[..., :0, :], values[..., :0, :]))
        held = layers[layer_index]
        layers[layer_index] = (self._updated(held[0], keys), self._updated(held[1], values))
        return self._combined(held[0], keys), self._combined(held[1], values)

    def update_embeddings(self, new: Tensor) -> Tensor:
        """The embeddings [B, K, width] of all places that are held or new [B, n, width]."""
        held = self.kv_cache.embeddings
        held = new[:, :0] if held is None else held
        self.kv_cache.embeddings = self._updated(held, new)
        return self._combined(held, new)

    def _combined(self, cached: Tensor, new: Tensor) -> Tensor:
        if cached.shape[-2] == 0:
            return new
        cached = cached if self.sequence_ids is None else cached[self.sequence_ids]
        before = self.start - self.kv_cache.start
        return torch.cat([cached[..., :before, :], new, cached[..., before + new.shape[-2] :, :]], -2)

    def _updated(self, cached: Tensor, new: Tensor) -> Tensor:
        keep = new.shape[-2] if self.keep is None else self.keep
        if keep == 0:
            return cached
        before = self.start - self.kv_cache.start
        return torch.cat([cached[..., :before, :], new[..., :keep, :], cached[..., before + keep :, :]], -2)


def kv_view(context: Context) -> KVCacheView | None:
    """The context's cache; refuse one that another kind of network has made."""
    if context.cache is not None and not isinstance(context.cache, KVCacheView):
        raise ValueError(
            f"this network caches keys and values, and was given a {type(context.cache).__name__}:"
            " take a cache from its own new_cache()"
        )
    return context.cache


@dataclass(frozen=True)
class AttentionContext:
    """What the queries of a call see of its keys: those held before `start`, the new ones, those held
    after."""

    mask: Tensor | None
    """[B or 1, 1, n or 1, K] booleans; None where everybody sees everybody, or all before them if causal."""
    position_ids: Tensor
    """int64 [n] or, where rows begin with padding, [B, n]: what a token is told of where it stands."""
    query_positions: Tensor
    key_positions: Tensor
    shared_mask: Tensor | None
    """[n, K]: as far as it is the same in all rows."""
    valid: Tensor | None
    """[B, K]."""
    document_ids: Tensor | None
    """[B, places]."""

    def relative_keys(self, offset: int) -> tuple[Tensor, Tensor]:
        """For each query the key [n] that stands `offset` places further, and whether it sees it [B or 1,
        n]."""
        there = self.key_positions == self.query_positions[:, None] + offset
        if self.shared_mask is not None:
            there = there & self.shared_mask
        key, found = there.int().argmax(1), there.any(1)[None]
        if self.valid is not None:
            found = found & self.valid[:, key]
        if self.document_ids is not None:
            found = found & (
                self.document_ids[:, self.query_positions] == self.document_ids[:, self.key_positions[key]]
            )
        return key, found

    def previous_positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where networks that predict the next token are read: the rows [B, n] that stand one place before
        the asked ones, and for each asked row which of these it is [N]. The first place of a text is its
        own."""
        key, found = self.relative_keys(-1)
        itself = torch.arange(len(key), device=key.device)
        held = len(self.key_positions) - len(key)
        first = 0 if held == 0 else int((self.key_positions == self.query_positions[0]).int().argmax())
        source = torch.where(found, key - first, itself).expand(positions.shape)
        if bool(((source < 0) & positions).any()):
            raise ValueError("a network that predicts the next token must read the one before an asked one")
        sequence, place = positions.nonzero(as_tuple=True)
        there = source[sequence, place]
        asked = torch.zeros_like(positions)
        asked[sequence, there] = True
        number = asked.flatten().cumsum(0) - 1
        return asked, number[sequence * positions.shape[1] + there]


def attention_context(
    length: int,
    device: torch.device,
    *,
    causal: bool,
    context: Context = Context(),
) -> AttentionContext:
    """Who sees whom in a call of `length` tokens; `valid` and `documents` [B, places] are those of the
    text."""
    valid, document_ids, stages = context.valid, context.document_ids, context.stages
    cache = kv_view(context)
    start = 0 if cache is None else cache.start
    query = torch.arange(start, start + length, device=device) if stages is None else stages.position
    key, before, held = query, 0, 0
    if cache is not None and cache.cached_length:
        first, held = cache.kv_cache.start, cache.cached_length
        before, last = start - first, max(start + length, first + held)
        key = torch.arange(first, last, device=device)
        key[before : before + length] = query
    # Where it is all that is asked, scaled_dot_product_attention has a faster way to be causal.
    plain = held == 0 and causal and stages is None and valid is None and document_ids is None
    ordered = None if plain else _shared_mask(length, before, key, causal, stages)
    seen = None if ordered is None else ordered[None, None]
    of_keys = None if valid is None else valid[:, key]
    if of_keys is not None:
        seen = of_keys[:, None, None] if seen is None else seen & of_keys[:, None, None]
    if document_ids is not None:
        same = document_ids[:, None, query, None] == document_ids[:, None, None, key]
        seen = same if seen is None else seen & same
    if seen is not None and seen.shape[2] > 1:  # padding, which may see nothing else, sees itself
        itself = torch.arange(length, device=device)
        seen = seen.clone()
        seen[:, :, itself, before + itself] = True
    return AttentionContext(seen, _position_ids(query, valid), query, key, ordered, of_keys, document_ids)


def flex_block_mask(mask: Tensor) -> Any:
    """The same for flex attention, which leaves out what nobody sees: half of the pairs of two streams."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, keys = mask.shape

    def looks(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[row if rows > 1 else 0, 0, query, key]

    return create_block_mask(looks, rows if rows > 1 else None, None, queries, keys, device=mask.device)


def _shared_mask(
    num_queries: int, offset: int, key_positions: Tensor, causal: bool, stages: AttentionStages | None
) -> Tensor | None:
    """[n, K], or None where all see all."""
    if stages is None and not causal:
        return None
    new = torch.ones(num_queries, num_queries, dtype=torch.bool, device=key_positions.device)
    new = new.tril() if stages is None else stages.mask()
    if bool(new.all()):
        return None
    ordered = torch.ones(num_queries, len(key_positions), dtype=torch.bool, device=key_positions.device)
    ordered[:, offset : offset + num_queries] = new
    return ordered


def _position_ids(positions: Tensor, valid: Tensor | None) -> Tensor:
    """Text begins after the padding before it."""
    if valid is None or bool(valid[:, 0].all()):
        return positions
    padding = (~valid).long().cumprod(1).sum(1, keepdim=True)
    return (positions - padding).clamp(min=0)
