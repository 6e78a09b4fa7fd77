"""What a network gets besides tokens and times: padding, documents, attention stages and a cache.

One `Context` is passed from the caller of a denoiser to the network's attention layers. Samplers make a
`Cache` with `denoiser.new_cache()` and know nothing of its inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AttentionStages:
    """An attention order for text that is generated block by block.

    A query attends to all keys of its own stage, and to the persistent keys of earlier stages. A token
    that is read twice, noisy and clean, has two indices with the same position.
    """

    stage: Tensor
    """int64 [L]: the stage of each token; where sequences differ, [B, L], and so are the other two."""
    persistent: Tensor
    """bool [L]: whether later stages attend to the token."""
    position: Tensor
    """int64 [L]: the token's position in the text."""
    first_position: int
    """The smallest position."""
    num_positions: int
    """The number of positions of the text, however often each of them is read."""
    single_stage: bool
    """Whether all tokens are of one stage, so that all attend to all."""

    @classmethod
    def two_stream(cls, length: int, block_size: int, device: torch.device) -> AttentionStages:
        """[z ; x]: a noisy block attends to itself and to the clean blocks before it, a clean block to the
        clean blocks up to itself."""
        return _two_stream(length, block_size, device)

    @classmethod
    def block_causal(
        cls, first: int, last: int, block_size: int, first_noisy: int, device: torch.device, offset: int = 0
    ) -> AttentionStages:
        """Positions first, ..., last - 1; later blocks do not attend to those from `first_noisy` on.

        The first block of the text is `offset` tokens shorter than the others.
        """
        return _block_causal(first, last, block_size, first_noisy, device, offset)

    @classmethod
    def stacked(cls, stages: Sequence[AttentionStages], shapes: Sequence[tuple[int, int]]) -> AttentionStages:
        """Those of several calls, of `shapes` (B, L), as one of all their sequences, padded to the longest."""
        longest = max(length for _, length in shapes)
        if all(one is stages[0] for one in stages):
            return stages[0]

        def stack(name: str) -> Tensor:
            rows = [torch.nn.functional.pad(getattr(one, name), (0, longest - one.stage.shape[-1])) for one in stages]
            return torch.cat([row.expand(num, -1) for row, (num, _) in zip(rows, shapes, strict=True)])

        return cls(
            stack("stage"),
            stack("persistent"),
            stack("position"),
            min(one.first_position for one in stages),
            max(one.num_positions for one in stages),
            all(one.single_stage for one in stages),
        )

    def mask(self) -> Tensor:
        """[L, L] or [B, L, L] booleans: whether query i attends to key j."""
        query, key = self.stage[..., :, None], self.stage[..., None, :]
        return (self.persistent[..., None, :] & (key < query)) | (key == query)


@lru_cache(maxsize=256)
@torch.inference_mode(mode=False)  # later calls may need gradients
def _block_causal(
    first: int, last: int, block_size: int, first_noisy: int, device: torch.device, offset: int
) -> AttentionStages:
    """All steps of a block, and all requests at the same block, have the same."""
    position = torch.arange(first, last, device=device)
    stage = 2 * ((position + offset) // block_size) + (position < first_noisy)
    same_block = (first + offset) // block_size == (last + offset - 1) // block_size
    single_stage = same_block and not first < first_noisy < last
    return AttentionStages(stage, position < first_noisy, position, first, last - first, single_stage)


@lru_cache(maxsize=16)
def _two_stream(length: int, block_size: int, device: torch.device) -> AttentionStages:
    position = torch.arange(length, device=device)
    stage = 2 * (position // block_size)
    persistent = torch.arange(2 * length, device=device) >= length
    stages = torch.cat([stage, stage + 1])
    return AttentionStages(stages, persistent, torch.cat([position, position]), 0, length, single_stage=False)


class CacheView(ABC):
    """What a network sees of a cache in one call. What else it offers is between the network and its cache."""

    @property
    @abstractmethod
    def start(self) -> int:
        """The position of the call's first token in the text; the largest of them, where texts differ."""

    @property
    def valid_on_host(self) -> NDArray[np.bool_] | None:
        """bool [B, n]: False on padding after the call's tokens, where calls of different lengths were merged; None
        if there is none."""
        return None

    @property
    def batch_key(self) -> Hashable | None:
        """Views with equal keys can be merged, whatever the lengths of their texts: a server calls the network once
        beside the caches of several requests. None: a view that cannot be merged."""
        return None

    @property
    def cached_length(self) -> int:
        """The number of positions in the cache, to which those of a merged call are padded."""
        return 0

    def merge(self, others: Sequence[Any], shapes: Sequence[tuple[int, int]]) -> CacheView:
        """One view of the sequences of all calls, this one's first, with tokens of `shapes` (B, n) each."""
        raise ValueError(f"{type(self).__name__} cannot be merged with other views")

    def commit(self) -> None:  # noqa: B027  (most views have nothing to do)
        """Cache what a merged call has read. Before that all caches are as they were, so that a call that fails can be
        repeated. What a call beside one cache reads is cached at once."""


@dataclass(frozen=True)
class Prefix:
    """The given beginning of texts that are read block by block, beside a cache that is exact: what is cached of a
    block depends on the tokens up to its end alone. So texts that begin alike can share what is cached of it."""

    tokens: Tensor
    """int64 [B, p]: the tokens as the network reads them."""
    block_size: int = 1
    """Tokens of a block; 1 for a causal network."""
    offset: int = 0
    """How much shorter than the others the first block is."""


@dataclass(frozen=True)
class CacheSegment:
    """What is cached of consecutive positions of one text."""

    stop: int
    """The position after its last one."""
    layers: tuple[tuple[Tensor, ...], ...]
    """The tensors of each layer."""
    embeddings: Tensor | None = None
    """Those of the tokens, if the network needs them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [tensor for layer in self.layers for tensor in layer]
        tensors += [] if self.embeddings is None else [self.embeddings]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Cache(ABC):
    """What a network keeps of the tokens that it has read: keys and values, or a recurrent state.

    A backbone's `new_cache()` makes it; only that backbone looks inside.
    """

    @property
    @abstractmethod
    def end(self) -> int:
        """The position after the last one that is cached."""

    @abstractmethod
    def view(self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None) -> CacheView:
        """A view for one call, whose tokens stand at `start` (by default, at `end`) and the positions after it.

        The first `keep` of them (by default, all) are cached from then on. `sequence_ids` [B] are the call's
        sequences among the cached ones; None means all of them, in order.
        """

    @abstractmethod
    def select(self, sequence_ids: Tensor) -> None:
        """Keep only these sequences, in this order."""

    @abstractmethod
    def evict_before(self, position: int) -> None:
        """Forget all positions before this one."""

    remembers_end_only: bool = False
    """Whether a segment can be taken only while it is the last one, as from a recurrent state."""

    def segment(self, start: int, stop: int) -> CacheSegment | None:
        """A copy of what is cached of these positions of the only text; None if this kind of cache gives none."""
        return None

    def load(self, segments: Sequence[CacheSegment]) -> None:
        """Begin with segments of a text, the first of which begins with the text."""
        raise ValueError(f"{type(self).__name__} gives no segments, and takes none")


@dataclass(frozen=True)
class Context:
    """What a network gets besides tokens and times. All of it is optional."""

    valid: Tensor | None = None
    """bool [B, positions of the text]: False on padding, which no token attends to."""
    document_ids: Tensor | None = None
    """int64 [B, positions of the text]: tokens attend only to tokens of their own document."""
    stages: AttentionStages | None = None
    """The attention order of text that is read block by block."""
    cache: CacheView | None = None
    """Where keys and values of earlier calls are read, and those of this call are kept."""
    segment_ids: Tensor | None = None
    """int64 [B, positions of the text]: 0 in the first text of a pair and 1 in the second (BERT's token types)."""
    valid_on_host: NDArray[np.bool_] | None = field(default=None, compare=False)
    """`valid` as the host knows it: padding is then laid out without waiting for the device. None: it is read."""

    def __post_init__(self) -> None:
        known, valid = self.valid_on_host, self.valid
        if known is not None and (valid is None or known.shape != valid.shape):
            raise ValueError("valid_on_host must be the same booleans as valid: replace both, or set it to None")

    @property
    def is_empty(self) -> bool:
        """Whether nothing is given."""
        return all(value is None for value in vars(self).values())
