"""Who looks at whom: padding, documents, text that is read in stages, and what was read before.

A network reads tokens beside keys and values that it keeps from earlier calls. What a query may look at, and
where a token stands, is worked out here once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FLEX = frozenset({"cuda"})
"""Devices on which flex attention has a backward pass."""


@dataclass(frozen=True)
class Order:
    """Text that is read in stages, as where it is written block by block.

    A position sees all of its own stage and, of earlier stages, what lasts. `place` is where a token stands
    in the text; a token that is read twice, hidden and clean, has two positions of one place.
    """

    stage: Tensor
    """int64 [L]."""
    lasts: Tensor
    """bool [L]."""
    place: Tensor
    """int64 [L]."""

    @classmethod
    def twice(cls, length: int, block: int, device: torch.device) -> Order:
        """[z ; x]: noisy blocks see themselves and the clean ones before them, clean ones those up to
        theirs."""
        return _twice(length, block, device)

    @classmethod
    def block_by_block(cls, first: int, last: int, block: int, noisy: int, device: torch.device) -> Order:
        """The places first, ..., last - 1, those from `noisy` on being hidden: nobody after them sees
        them."""
        place = torch.arange(first, last, device=device)
        return cls(2 * (place // block) + (place < noisy), place < noisy, place)

    @property
    def places(self) -> int:
        """How many there are, however often they are read."""
        return int(self.place.max() - self.place.min()) + 1

    def seen(self) -> Tensor:
        """[L, L] booleans: whether query i sees key j."""
        earlier = self.lasts & (self.stage < self.stage[:, None])
        return earlier | (self.stage == self.stage[:, None])


@lru_cache(maxsize=16)
def _twice(length: int, block: int, device: torch.device) -> Order:
    place = torch.arange(length, device=device)
    stage = 2 * (place // block)
    lasts = torch.arange(2 * length, device=device) >= length
    return Order(torch.cat([stage, stage + 1]), lasts, torch.cat([place, place]))


class KVCache:
    """Keys and values of places that were read before, one pair a layer; `first` is the place of the first.

    Sequences may be dropped when they have ended, and the oldest places when there are too many.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.embedded: Tensor | None = None
        self.first = 0

    @property
    def end(self) -> int:
        """The place after the last that is held."""
        return self.first + (self.layers[-1][0].shape[-2] if self.layers else 0)

    def beside(self, start: int | None = None, keep: int | None = None, rows: Tensor | None = None) -> Beside:
        """A call whose tokens stand at `start` (after all that is held, if None); the first `keep` of them
        (all, if None) are held from then on. `rows` are its sequences among those held."""
        return Beside(self, self.end if start is None else start, keep, rows)

    def only(self, rows: Tensor) -> None:
        """Go on with these sequences."""
        self._each(lambda held: held[rows])

    def forget(self, before: int) -> None:
        """Drop the places before this one."""
        places = slice(max(0, before - self.first), None)
        self._each(lambda held: held[..., places, :])
        self.first = max(self.first, before)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.layers = [(change(keys), change(values)) for keys, values in self.layers]
        self.embedded = None if self.embedded is None else change(self.embedded)


@dataclass(frozen=True)
class Beside:
    """A call beside a cache: its tokens stand at the place `start` and those after it."""

    cache: KVCache
    start: int
    keep: int | None
    rows: Tensor | None

    @property
    def held(self) -> int:
        """Places in the cache."""
        return self.cache.end - self.cache.first

    def layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, heads, K, d] that a layer looks at, the new ones [B, heads, n, d] in
        their place."""
        layers = self.cache.layers
        if number == len(layers):
            layers.append((keys[..., :0, :], values[..., :0, :]))
        held = layers[number]
        layers[number] = (self._kept(held[0], keys), self._kept(held[1], values))
        return self._around(held[0], keys), self._around(held[1], values)

    def embedded(self, new: Tensor) -> Tensor:
        """The embeddings [B, K, width] of all places that are held or new [B, n, width]."""
        held = self.cache.embedded
        held = new[:, :0] if held is None else held
        self.cache.embedded = self._kept(held, new)
        return self._around(held, new)

    def _around(self, held: Tensor, new: Tensor) -> Tensor:
        if held.shape[-2] == 0:
            return new
        held = held if self.rows is None else held[self.rows]
        before = self.start - self.cache.first
        return torch.cat([held[..., :before, :], new, held[..., before + new.shape[-2] :, :]], -2)

    def _kept(self, held: Tensor, new: Tensor) -> Tensor:
        keep = new.shape[-2] if self.keep is None else self.keep
        if keep == 0:
            return held
        before = self.start - self.cache.first
        return torch.cat([held[..., :before, :], new[..., :keep, :], held[..., before + keep :, :]], -2)


@dataclass(frozen=True)
class Sight:
    """What the queries of a call see of its keys: those held before `start`, the new ones, those held
    after."""

    seen: Tensor | None
    """[B or 1, 1, n or 1, K] booleans; None where everybody sees everybody, or all before them if causal."""
    position: Tensor
    """int64 [n] or, where rows begin with padding, [B, n]: what a token is told of where it stands."""
    query_place: Tensor
    key_place: Tensor
    ordered: Tensor | None
    """[n, K]: as far as it is the same in all rows."""
    valid: Tensor | None
    """[B, K]."""
    documents: Tensor | None
    """[B, places]."""

    def neighbours(self, offset: int) -> tuple[Tensor, Tensor]:
        """For each query the key [n] that stands `offset` places further, and whether it sees it [B or 1,
        n]."""
        there = self.key_place == self.query_place[:, None] + offset
        if self.ordered is not None:
            there = there & self.ordered
        key, found = there.int().argmax(1), there.any(1)[None]
        if self.valid is not None:
            found = found & self.valid[:, key]
        if self.documents is not None:
            found = found & (self.documents[:, self.query_place] == self.documents[:, self.key_place[key]])
        return key, found

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where networks that predict the next token are read: the rows [B, n] that stand one place before
        the asked ones, and for each asked row which of these it is [N]. The first place of a text is its
        own."""
        key, found = self.neighbours(-1)
        itself = torch.arange(len(key), device=key.device)
        held = len(self.key_place) - len(key)
        first = 0 if held == 0 else int((self.key_place == self.query_place[0]).int().argmax())
        source = torch.where(found, key - first, itself).expand(rows.shape)
        if bool(((source < 0) & rows).any()):
            raise ValueError("a network that predicts the next token must read the one before an asked one")
        sequence, place = rows.nonzero(as_tuple=True)
        there = source[sequence, place]
        asked = torch.zeros_like(rows)
        asked[sequence, there] = True
        number = asked.flatten().cumsum(0) - 1
        return asked, number[sequence * rows.shape[1] + there]


def sight(
    length: int,
    device: torch.device,
    *,
    causal: bool,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    order: Order | None = None,
    beside: Beside | None = None,
) -> Sight:
    """Who sees whom in a call of `length` tokens; `valid` and `documents` [B, places] are those of the
    text."""
    start = 0 if beside is None else beside.start
    query = torch.arange(start, start + length, device=device) if order is None else order.place
    key, before, held = query, 0, 0
    if beside is not None and beside.held:
        first, held = beside.cache.first, beside.held
        before, last = start - first, max(start + length, first + held)
        key = torch.arange(first, last, device=device)
        key[before : before + length] = query
    # Where it is all that is asked, scaled_dot_product_attention has a faster way to be causal.
    plain = held == 0 and causal and order is None and valid is None and documents is None
    ordered = None if plain else _ordered(length, before, key, causal, order)
    seen = None if ordered is None else ordered[None, None]
    of_keys = None if valid is None else valid[:, key]
    if of_keys is not None:
        seen = of_keys[:, None, None] if seen is None else seen & of_keys[:, None, None]
    if documents is not None:
        same = documents[:, None, query, None] == documents[:, None, None, key]
        seen = same if seen is None else seen & same
    if seen is not None and seen.shape[2] > 1:  # padding, which may see nothing else, sees itself
        itself = torch.arange(length, device=device)
        seen = seen.clone()
        seen[:, :, itself, before + itself] = True
    return Sight(seen, _position(query, valid), query, key, ordered, of_keys, documents)


def sparse(seen: Tensor) -> Any:
    """The same for flex attention, which leaves out what nobody sees: half of the pairs of two streams."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, keys = seen.shape

    def looks(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[row if rows > 1 else 0, 0, query, key]

    return create_block_mask(looks, rows if rows > 1 else None, None, queries, keys, device=seen.device)


def _ordered(queries: int, before: int, key: Tensor, causal: bool, order: Order | None) -> Tensor | None:
    """[n, K], or None where all see all."""
    if order is None and not causal:
        return None
    new = torch.ones(queries, queries, dtype=torch.bool, device=key.device)
    new = new.tril() if order is None else order.seen()
    if bool(new.all()):
        return None
    ordered = torch.ones(queries, len(key), dtype=torch.bool, device=key.device)
    ordered[:, before : before + queries] = new
    return ordered


def _position(place: Tensor, valid: Tensor | None) -> Tensor:
    """Text begins after the padding before it."""
    if valid is None or bool(valid[:, 0].all()):
        return place
    padding = (~valid).long().cumprod(1).sum(1, keepdim=True)
    return (place - padding).clamp(min=0)
