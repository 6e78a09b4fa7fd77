"""The cache of recurrent networks: states, of one request or of several in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.backbones._merged_rows import MergedRows
from unmask.context import Cache, CacheSegment, CacheView


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
    ) -> _OneRecurrentCacheView:
        if start not in (None, self._end):
            raise ValueError(f"a recurrent network reads in order: the next position is {self._end}; got {start}")
        return _OneRecurrentCacheView(self, keep, sequence_ids)

    def select(self, sequence_ids: Tensor) -> None:
        self.layers = [(window[sequence_ids], state[sequence_ids]) for window, state in self.layers]

    def evict_before(self, position: int) -> None:
        if position <= 0:
            return
        if position < self._end:
            raise ValueError(f"a recurrent state cannot forget a part of its {self._end} tokens; take a new cache")
        self.layers, self._end = [], position

    remembers_end_only = True

    def segment(self, start: int, stop: int) -> CacheSegment | None:
        """The state at `stop`, which is all that a text that goes on from there needs."""
        layers = tuple((window.clone(), state.clone()) for window, state in self.layers)
        return CacheSegment(stop, layers) if stop == self._end else None

    def load(self, segments: Sequence[CacheSegment]) -> None:
        last = segments[-1]
        self.layers, self._end = [(window, state) for window, state in last.layers], last.stop

    def advance(self, length: int) -> None:
        """`length` more tokens have been read."""
        self._end += length


class RecurrentCacheView(CacheView):
    """What a recurrent network sees of its states."""

    @abstractmethod
    def read(self, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
        """The window [B, K - 1, D] of the convolution and the state [B, D, N]; None before the first token."""

    def window(self, inputs: Tensor, size: int) -> Tensor:
        """The last `size` inputs [B, size, D] of each sequence, among [B, size + n, D]."""
        return inputs[:, inputs.shape[1] - size :]

    @abstractmethod
    def write(self, layer_index: int, window: Tensor, state: Tensor) -> None:
        """Cache what a layer ends with."""

    @abstractmethod
    def advance(self, length: int) -> None:
        """The call has read `length` tokens."""


class _OneRecurrentCacheView(RecurrentCacheView):
    """One call beside a recurrent cache: all of its tokens are cached, or none (`keep=0`)."""

    def __init__(self, cache: RecurrentCache, keep: int | None, sequence_ids: Tensor | None) -> None:
        self.cache, self.keep, self.sequence_ids = cache, keep, sequence_ids

    @property
    def start(self) -> int:
        return self.cache.end

    @property
    def batch_key(self) -> Hashable:
        return _OneRecurrentCacheView

    def merge(self, others: Sequence[_OneRecurrentCacheView], shapes: Sequence[tuple[int, int]]) -> CacheView:
        return _MergedRecurrentCacheView([self, *others], shapes)

    def read(self, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
        if layer_index >= len(self.cache.layers):
            return None, None
        window, state = self.cache.layers[layer_index]
        return (window, state) if self.sequence_ids is None else (window[self.sequence_ids], state[self.sequence_ids])

    def write(self, layer_index: int, window: Tensor, state: Tensor) -> None:
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
        if self.keep not in (None, 0, length):
            raise ValueError(f"a recurrent cache keeps all {length} tokens of a call, or none; got keep={self.keep}")
        self.cache.advance(0 if self.keep == 0 else length)


class _MergedRecurrentCacheView(RecurrentCacheView):
    """One call beside the recurrent caches of several, whose tokens are padded to the longest."""

    def __init__(self, views: Sequence[_OneRecurrentCacheView], shapes: Sequence[tuple[int, int]]) -> None:
        self._views, self._rows = views, MergedRows(shapes)
        self._new: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def start(self) -> int:
        return max(view.start for view in self._views)

    @property
    def valid_on_host(self) -> NDArray[np.bool_] | None:
        return self._rows.valid

    def read(self, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
        pairs = [view.read(layer_index) for view in self._views]
        return self._stacked([window for window, _ in pairs]), self._stacked([state for _, state in pairs])

    def window(self, inputs: Tensor, size: int) -> Tensor:
        last = torch.from_numpy(self._rows.lengths).to(inputs.device)[:, None] + torch.arange(
            size, device=inputs.device
        )
        return inputs.gather(1, last[..., None].expand(-1, -1, inputs.shape[2]))

    def write(self, layer_index: int, window: Tensor, state: Tensor) -> None:
        self._new[layer_index] = window, state

    def advance(self, length: int) -> None:
        """Each cache advances by its own tokens, in `commit`."""

    def commit(self) -> None:
        for view, rows, (_, length) in zip(self._views, self._rows.slices, self._rows.shapes, strict=True):
            for layer_index, (window, state) in self._new.items():
                view.write(layer_index, window[rows], state[rows].clone())
            view.advance(length)

    def _stacked(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        """The parts of all calls, with zeros for texts that have not begun; None if none has."""
        known = next((part for part in parts if part is not None), None)
        if known is None:
            return None
        sizes = [num for num, _ in self._rows.shapes]
        new = [
            known.new_zeros(num, *known.shape[1:]) if part is None else part
            for part, num in zip(parts, sizes, strict=True)
        ]
        return torch.cat(new)
