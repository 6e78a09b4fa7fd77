"""Caches of keys and values, for networks whose tokens attend to each other.

A call sees a cache through a view, or the caches of several requests through one merged view; networks do not tell
them apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.backbones._merged_rows import MergedRows
from unmask.context import Cache, CacheSegment, CacheView, Context

_PADDING_POSITION = -(1 << 40)
"""The position of keys that are padding: far from those of all queries."""


class KVCache(Cache):
    """Keys and values of each layer, for the positions `start` to `end` - 1."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        """Keys and values [2, B, heads, length, d] of each layer."""
        self.embeddings: Tensor | None = None
        self.start = 0

    @property
    def end(self) -> int:
        return self.start + (self.layers[-1].shape[-2] if self.layers else 0)

    def view(
        self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None
    ) -> _OneKVCacheView:
        return _OneKVCacheView(self, self.end if start is None else start, keep, sequence_ids)

    def select(self, sequence_ids: Tensor) -> None:
        self.layers = [cached[:, sequence_ids] for cached in self.layers]
        self.embeddings = None if self.embeddings is None else self.embeddings[sequence_ids]

    def evict_before(self, position: int) -> None:
        if position <= self.start:
            return
        self.layers = [cached[..., position - self.start :, :] for cached in self.layers]
        self.embeddings = None if self.embeddings is None else self.embeddings[:, position - self.start :]
        self.start = position

    def segment(self, start: int, stop: int) -> CacheSegment:
        part = slice(start - self.start, stop - self.start)
        layers = tuple((cached[..., part, :].clone(),) for cached in self.layers)
        embeddings = None if self.embeddings is None else self.embeddings[:, part].clone()
        return CacheSegment(stop, layers, embeddings)

    def load(self, segments: Sequence[CacheSegment]) -> None:
        by_layer = zip(*(segment.layers for segment in segments), strict=True)
        self.layers = [torch.cat([cached for (cached,) in parts], -2) for parts in by_layer]
        embeddings = [segment.embeddings for segment in segments if segment.embeddings is not None]
        self.start, self.embeddings = 0, torch.cat(embeddings, -2) if embeddings else None


class KVCacheView(CacheView):
    """What attention sees of cached keys and values: C of them in front of the call's own n."""

    @property
    def pads_keys(self) -> bool:
        """Whether some of the cached keys are padding."""
        return False

    @abstractmethod
    def span(self, length: int) -> tuple[int, int]:
        """The smallest and the largest position of the call's tokens."""

    @abstractmethod
    def query_positions(self, length: int, device: torch.device) -> Tensor:
        """int64 [B or 1, n]: the positions of the call's tokens."""

    @abstractmethod
    def key_positions(self, length: int, device: torch.device) -> Tensor | None:
        """int64 [B or 1, C]: the positions of the cached keys beside a call of `length` tokens; negative on padding.
        None if there are none."""

    @abstractmethod
    def update(self, layer_index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, heads, C + n, d] that a layer attends to, given the new ones [B, heads, n, d]."""

    @abstractmethod
    def update_embeddings(self, new: Tensor) -> Tensor:
        """The embeddings [B, C + n, width] of cached and new positions, given the new ones [B, n, width]."""


class _OneKVCacheView(KVCacheView):
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
        return self.kv_cache.end - self.kv_cache.start

    @property
    def batch_key(self) -> Hashable:
        return _OneKVCacheView

    def merge(self, others: Sequence[_OneKVCacheView], shapes: Sequence[tuple[int, int]]) -> CacheView:
        return _MergedKVCacheView([self, *others], shapes)

    def key_ranges(self, length: int) -> tuple[range, range]:
        """The cached positions before and after those of a call of `length` tokens, which replaces what is cached."""
        first, end = self.kv_cache.start, self.kv_cache.end
        return range(first, max(first, min(self.start, end))), range(min(self.start + length, end), end)

    def span(self, length: int) -> tuple[int, int]:
        return self.start, self.start + length - 1

    def query_positions(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + length, device=device)[None]

    def key_positions(self, length: int, device: torch.device) -> Tensor | None:
        parts = [torch.arange(part.start, part.stop, device=device) for part in self.key_ranges(length) if part]
        return torch.cat(parts)[None] if parts else None

    def update(self, layer_index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cached, new = self.attended(layer_index, keys.shape[-2]), torch.stack([keys, values])
        self.write(layer_index, new)
        all_keys, all_values = new if cached is None else torch.cat([cached, new], -2)
        return all_keys, all_values

    def update_embeddings(self, new: Tensor) -> Tensor:
        cached = self.attended_embeddings(new.shape[-2])
        self.write_embeddings(new)
        return new if cached is None else torch.cat([cached, new], -2)

    def attended(self, layer_index: int, length: int) -> Tensor | None:
        """The cached keys and values [2, B, heads, C, d] beside a call of `length` tokens; None if there are none."""
        if layer_index >= len(self.kv_cache.layers):
            return None
        cached = self.kv_cache.layers[layer_index]
        return self._beside(cached if self.sequence_ids is None else cached[:, self.sequence_ids], length)

    def attended_embeddings(self, length: int) -> Tensor | None:
        """The cached embeddings [B, C, width] beside a call of `length` tokens; None if there are none."""
        cached = self.kv_cache.embeddings
        if cached is None:
            return None
        return self._beside(cached if self.sequence_ids is None else cached[self.sequence_ids], length)

    def write(self, layer_index: int, new: Tensor) -> None:
        """Cache what is to be kept of new keys and values [2, B, heads, n, d]."""
        layers = self.kv_cache.layers
        if self.keep != 0:  # a call that keeps nothing must not start a cache: it may be of some sequences only
            cached = layers[layer_index] if layer_index < len(layers) else None
            layers[layer_index : layer_index + 1] = [self._updated(cached, new)]

    def write_embeddings(self, new: Tensor) -> None:
        """Cache what is to be kept of new embeddings [B, n, width]."""
        if self.keep != 0:
            self.kv_cache.embeddings = self._updated(self.kv_cache.embeddings, new)

    def _beside(self, cached: Tensor, length: int) -> Tensor:
        before, after = self.key_ranges(length)
        if not after:
            return cached[..., : len(before), :]
        return torch.cat([cached[..., : len(before), :], cached[..., cached.shape[-2] - len(after) :, :]], -2)

    def _updated(self, cached: Tensor | None, new: Tensor) -> Tensor:
        new = new[..., : self.keep, :]
        if cached is None:
            return new.clone()  # it may be a part of all queries, keys and values of a batch
        first = self.start - self.kv_cache.start
        return torch.cat([cached[..., :first, :], new, cached[..., first + new.shape[-2] :, :]], -2)


class _MergedKVCacheView(KVCacheView):
    """One call beside the caches of several: cached keys are padded to the longest, and so are the call's tokens.

    Keys of different sequences at one index may have different positions.
    """

    def __init__(self, views: Sequence[_OneKVCacheView], shapes: Sequence[tuple[int, int]]) -> None:
        self._views, self._rows = views, MergedRows(shapes)
        ranges = [view.key_ranges(length) for view, (_, length) in zip(views, shapes, strict=True)]
        self._cached = [np.array([*before, *after], dtype=np.int64) for before, after in ranges]
        self._num_cached = max(map(len, self._cached))
        self._new: dict[int, Tensor] = {}
        self._new_embeddings: Tensor | None = None

    @property
    def start(self) -> int:
        return max(view.start for view in self._views)

    @property
    def valid_on_host(self) -> NDArray[np.bool_] | None:
        return self._rows.valid

    @property
    def pads_keys(self) -> bool:
        return len({len(cached) for cached in self._cached}) > 1

    def span(self, length: int) -> tuple[int, int]:
        spans = [view.span(own) for view, (_, own) in zip(self._views, self._rows.shapes, strict=True)]
        return min(first for first, _ in spans), max(last for _, last in spans)

    def query_positions(self, length: int, device: torch.device) -> Tensor:
        start = self._rows.per_sequence([view.start for view in self._views])[:, None]
        last = start + self._rows.lengths[:, None] - 1
        return torch.from_numpy(np.minimum(start + np.arange(length), last)).to(device)  # padding: where text stands

    def key_positions(self, length: int, device: torch.device) -> Tensor | None:
        if self._num_cached == 0:
            return None
        positions = np.full((len(self._views), self._num_cached), _PADDING_POSITION)
        for row, cached in zip(positions, self._cached, strict=True):
            row[: len(cached)] = cached
        return torch.from_numpy(self._rows.per_sequence(positions)).to(device)

    def update(self, layer_index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new = self._new[layer_index] = torch.stack([keys, values])
        pairs = zip(self._views, self._rows.shapes, strict=True)
        all_keys, all_values = self._padded([view.attended(layer_index, length) for view, (_, length) in pairs], new)
        return all_keys, all_values

    def update_embeddings(self, new: Tensor) -> Tensor:
        self._new_embeddings = new
        pairs = zip(self._views, self._rows.shapes, strict=True)
        return self._padded([view.attended_embeddings(length) for view, (_, length) in pairs], new)

    def commit(self) -> None:
        for view, rows, (_, length) in zip(self._views, self._rows.slices, self._rows.shapes, strict=True):
            for layer_index, new in self._new.items():
                view.write(layer_index, new[:, rows, :, :length])
            if self._new_embeddings is not None:
                view.write_embeddings(self._new_embeddings[rows, :length])

    def _padded(self, cached: Sequence[Tensor | None], new: Tensor) -> Tensor:
        """[..., C + n, d]: the cached of each call, zeros after the shorter ones, and then the new.

        Sequences are the first dimension of embeddings [B, n, width], and the second of keys and values.
        """
        if self._num_cached == 0:
            return new
        padded = new.new_zeros(*new.shape[:-2], self._num_cached + new.shape[-2], new.shape[-1])
        by_sequence = padded if new.ndim == 3 else padded.transpose(0, 1)
        for rows, part in zip(self._rows.slices, cached, strict=True):
            if part is not None:
                by_sequence[rows, ..., : part.shape[-2], :] = part if new.ndim == 3 else part.transpose(0, 1)
        padded[..., self._num_cached :, :] = new
        return padded


def kv_view(context: Context) -> KVCacheView | None:
    """The context's cache; refuse one that another kind of network has made."""
    if context.cache is not None and not isinstance(context.cache, KVCacheView):
        raise ValueError(
            f"this network caches keys and values, and was given a {type(context.cache).__name__}:"
            " take a cache from its own new_cache()"
        )
    return context.cache
