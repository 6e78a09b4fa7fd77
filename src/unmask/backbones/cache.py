"""Caches: of keys and values, for networks whose tokens attend to each other, and of recurrent states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unmask.context import Cache, CacheView, Context


class KVCache(Cache):
    """Keys and values of each layer, for the positions `start` to `end` - 1."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.embeddings: Tensor | None = None
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + (self.layers[-1][0].shape[-2] if self.layers else 0)

    def view(
        self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None
    ) -> KVCacheView:
        return KVCacheView(self, self.end if start is None else start, keep, sequence_ids)

    def select(self, sequence_ids: Tensor) -> None:
        self._map(lambda cached: cached[sequence_ids])

    def evict_before(self, position: int) -> None:
        remaining = slice(max(0, position - self.start), None)
        self._map(lambda cached: cached[..., remaining, :])
        self.start = max(self.start, position)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.layers = [(fn(keys), fn(values)) for keys, values in self.layers]
        self.embeddings = None if self.embeddings is None else fn(self.embeddings)


class KVCacheView(CacheView):
    """One call with a cache: the call's tokens are at position `start` and after it.

    Keys and values of the first `keep` tokens (all, if None) are cached. `sequence_ids` are the call's
    sequences among the cached ones.
    """

    def __init__(self, kv_cache: KVCache, start: int, keep: int | None, sequence_ids: Tensor | None) -> None:
        self.kv_cache, self.keep, self.sequence_ids = kv_cache, keep, sequence_ids
        self._start = start

    @property
    def start(self) -> int:
        return self._start

    @property
    def cached_length(self) -> int:
        """The number of cached positions."""
        return self.kv_cache.end - self.kv_cache.start

    @property
    def num_before(self) -> int:
        """The number of cached positions before the call's first token."""
        return self.start - self.kv_cache.start

    def update(self, layer_index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, heads, K, d] that a layer attends to, given the new ones [B, heads, n, d]."""
        layers = self.kv_cache.layers
        is_new = layer_index >= len(layers)
        cached = (keys[..., :0, :], values[..., :0, :]) if is_new else layers[layer_index]
        if not (is_new and self._keeps_nothing):
            layers[layer_index : layer_index + 1] = [(self._updated(cached[0], keys), self._updated(cached[1], values))]
        return self._combined(cached[0], keys), self._combined(cached[1], values)

    def update_embeddings(self, new: Tensor) -> Tensor:
        """The embeddings [B, K, width] of all cached and new positions, given the new ones [B, n, width]."""
        cached = self.kv_cache.embeddings
        if cached is None:
            self.kv_cache.embeddings = None if self._keeps_nothing else self._updated(new[:, :0], new)
            return new
        self.kv_cache.embeddings = self._updated(cached, new)
        return self._combined(cached, new)

    @property
    def _keeps_nothing(self) -> bool:
        """Such a call must not start a cache: it may be of some of the sequences only."""
        return self.keep == 0

    def _combined(self, cached: Tensor, new: Tensor) -> Tensor:
        if cached.shape[-2] == 0:
            return new
        cached = cached if self.sequence_ids is None else cached[self.sequence_ids]
        after = self.num_before + new.shape[-2]
        return torch.cat([cached[..., : self.num_before, :], new, cached[..., after:, :]], -2)

    def _updated(self, cached: Tensor, new: Tensor) -> Tensor:
        keep = new.shape[-2] if self.keep is None else self.keep
        if keep == 0:
            return cached
        after = self.num_before + keep
        return torch.cat([cached[..., : self.num_before, :], new[..., :keep, :], cached[..., after:, :]], -2)


def kv_view(context: Context) -> KVCacheView | None:
    """The context's cache; refuse one that another kind of network has made."""
    if context.cache is not None and not isinstance(context.cache, KVCacheView):
        raise ValueError(
            f"this network caches keys and values, and was given a {type(context.cache).__name__}:"
            " take a cache from its own new_cache()"
        )
    return context.cache


class RecurrentCache(Cache):
    """The state of each layer after the tokens read so far, and the last inputs of its convolution.

    It has the same size however long the text is. A text is read in order, and cannot be forgotten in part.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._end = 0

    @property
    def end(self) -> int:
        return self._end

    def view(
        self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None
    ) -> RecurrentCacheView:
        if start not in (None, self._end):
            raise ValueError(f"a recurrent network reads in order: the next position is {self._end}; got {start}")
        return RecurrentCacheView(self, keep, sequence_ids)

    def select(self, sequence_ids: Tensor) -> None:
        self.layers = [(window[sequence_ids], state[sequence_ids]) for window, state in self.layers]

    def evict_before(self, position: int) -> None:
        if position <= 0:
            return
        if position < self._end:
            raise ValueError(f"a recurrent state cannot forget a part of its {self._end} tokens; take a new cache")
        self.layers, self._end = [], position


class RecurrentCacheView(CacheView):
    """One call beside a recurrent cache: all of its tokens are cached, or none (`keep=0`)."""

    def __init__(self, cache: RecurrentCache, keep: int | None, sequence_ids: Tensor | None) -> None:
        self.cache, self.keep, self.sequence_ids = cache, keep, sequence_ids

    @property
    def start(self) -> int:
        return self.cache.end

    def read(self, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
        """The window [B, K - 1, D] of the convolution and the state [B, D, N]; None before the first token."""
        if layer_index >= len(self.cache.layers):
            return None, None
        window, state = self.cache.layers[layer_index]
        return (window, state) if self.sequence_ids is None else (window[self.sequence_ids], state[self.sequence_ids])

    def write(self, layer_index: int, window: Tensor, state: Tensor) -> None:
        """Cache what a layer ends with."""
        layers, ids = self.cache.layers, self.sequence_ids
        if self.keep == 0:
            return
        if ids is None:
            layers[layer_index : layer_index + 1] = [(window.clone(), state)]
        elif layer_index < len(layers):
            old_window, old_state = layers[layer_index]
            layers[layer_index] = old_window.index_copy(0, ids, window), old_state.index_copy(0, ids, state)
        else:
            raise ValueError("a recurrent cache is started by a call with all of its sequences")

    def advance(self, length: int) -> None:
        """The call has read `length` tokens."""
        if self.keep not in (None, 0, length):
            raise ValueError(f"a recurrent cache keeps all {length} tokens of a call, or none; got keep={self.keep}")
        self.cache._end += 0 if self.keep == 0 else length
