"""Block by block, from left to right: each block is filled by a sampler that knows of nothing else.

Three families work like this, and differ in what the network reads at a step, and in what it keeps:

* LLaDA reads the whole text at each step, the blocks to come as masks;
* Fast-dLLM reads all of it once a block. At the other steps keys and values before the block
(`PrefixCache`), or
  on both sides of it (`DualCache`), are those of that pass: an approximation, as they would have changed;
* a block diffusion model never looks ahead, so what it has read of finished blocks stays true: an exact
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from unmask.context import AttentionStages, Cache, Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.noise import derive_seed
from unmask.diffusion.process import BlockMasking, Masking
from unmask.sampling.base import Sampler, init_tokens, require_process, resolve_option, time_from_mask_ratio
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Confidence
from unmask.sampling.semi_autoregressive import resolve_masked_sampler
from unmask.types import Positions, RowFn, Times, Tokens


class _ReadRange(NamedTuple):
    """The places that a call reads, `first` to `last` - 1, and how many of them from the first on are
    kept."""

    start: int
    stop: int
    num_cached: int


@dataclass(frozen=True)
class NoCache:
    """The whole text is read at every step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return _ReadRange(0, length, 0)


@dataclass(frozen=True)
class PrefixCache:
    """What is before a block is read once, with the block's first step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return _ReadRange(0, length, length) if first_step else _ReadRange(start, length, 0)


@dataclass(frozen=True)
class DualCache:
    """What is before and after a block is read once, with the block's first step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return _ReadRange(0, length, length) if first_step else _ReadRange(start, stop, 0)


_CachePolicy: TypeAlias = NoCache | PrefixCache | DualCache

CACHE_POLICIES: dict[str, _CachePolicy] = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
"""What commands and requests call them."""


@dataclass(frozen=True)
class Blockwise:
    """Blocks of `size` tokens, each filled by the `sampler`, whose steps are those of one block.

    Blocks begin at a row's first hole. A block diffusion model has a size of its own, which stays if `size`
    is None, its blocks begin with the text, and its cache is exact. A row ends with the block in which the
    token `stop` was written: what is left of it is filled with that token.
    """

    block_size: int | None = None
    sampler: Sampler | str = Confidence(steps=32)
    cache: _CachePolicy | str = NoCache()
    eos_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", resolve_masked_sampler(self.sampler))
        object.__setattr__(self, "cache", resolve_option(self.cache, CACHE_POLICIES, "cache"))
        if self.block_size is not None and not (isinstance(self.block_size, int) and self.block_size >= 1):
            raise ValueError(f"a block must have at least 1 token; got {self.block_size!r}")

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step of each block."""
        process = _masked_process(denoiser)
        z = init_tokens(denoiser, canvas, any_length=isinstance(process, BlockMasking))
        holes = z == denoiser.vocab.mask_id
        origin = holes.int().argmax(1).masked_fill(~holes.any(1), -1)
        if isinstance(process, BlockMasking):  # whose blocks begin with the text, whatever is given of it
            origin = torch.where(origin < 0, -1, origin // process.block_size * process.block_size)
        for first in sorted(set(origin.tolist())):  # a row is written alike in any company
            if first >= 0:
                yield from self._run_group(denoiser, z, canvas, (origin == first).nonzero()[:, 0], first, process)

    def _run_group(
        self,
        denoiser: DenoiserLike,
        z: Tokens,
        canvas: Canvas,
        sequence_ids: Tensor,
        first_start: int,
        process: Masking | BlockMasking,
    ) -> Iterator[Tokens]:
        """Write the rows whose first block begins at `first`, into `z`."""
        length = z.shape[1]
        size = self._resolve_block_size(process, length)
        plan, sampler = (
            resolve_option(self.cache, CACHE_POLICIES, "cache"),
            resolve_masked_sampler(self.sampler),
        )
        holes, cache = z == denoiser.vocab.mask_id, denoiser.new_cache()
        for number, begin in enumerate(range(first_start, length, size)):
            window = slice(begin, min(begin + size, length))
            if not isinstance(process, BlockMasking):
                cache = denoiser.new_cache()  # an approximation holds for a block
            view = _BlockView(denoiser, z, sequence_ids, holes[sequence_ids].sum(1), window, plan, cache)
            seeds = tuple(derive_seed(canvas.seeds[row], number) for row in sequence_ids.tolist())
            for written in sampler.run(view, Canvas(z[sequence_ids, window], seeds)):
                z[sequence_ids, window] = written
                yield z.clone()
            if self.eos_id is None:
                continue
            ended = ((z[sequence_ids] == self.eos_id) & holes[sequence_ids])[:, window].any(1)
            if bool(ended.any()):
                self._fill_after_eos(z, sequence_ids[ended], holes)
                yield z.clone()
                sequence_ids = sequence_ids[~ended]
                cache.select((~ended).nonzero()[:, 0])
                if len(sequence_ids) == 0:
                    return

    def _resolve_block_size(self, process: Masking | BlockMasking, length: int) -> int:
        if not isinstance(process, BlockMasking):
            return self.block_size or length
        if self.block_size not in (None, process.block_size):
            raise ValueError(f"the model writes blocks of {process.block_size} tokens; got a size of {self.block_size}")
        return process.block_size

    def _fill_after_eos(self, z: Tokens, sequence_ids: Tensor, masked: Tensor) -> None:
        """Fill all that was to be written after the first stop of a row."""
        assert self.eos_id is not None
        stops = (z[sequence_ids] == self.eos_id) & masked[sequence_ids]
        after = (stops.cumsum(1) > 0) & masked[sequence_ids]
        z[sequence_ids] = z[sequence_ids].masked_fill(after, self.eos_id)


def _masked_process(denoiser: DenoiserLike) -> Masking | BlockMasking:
    process = denoiser.process
    return process if isinstance(process, BlockMasking) else require_process(denoiser, Masking)


class _BlockView(DenoiserWrapper):
    """A network as it looks from inside a block: asked about the block, it reads whatever else it needs."""

    def __init__(
        self,
        denoiser: DenoiserLike,
        z: Tokens,
        outer_ids: Tensor,
        num_initial: Tensor,
        block_slice: slice,
        cache_policy: _CachePolicy,
        cache: Cache,
    ) -> None:
        super().__init__(denoiser)
        self.z, self.outer_ids, self.num_initial, self.block_slice, self.cache_policy, self.cache = (
            z,
            outer_ids,
            num_initial,
            block_slice,
            cache_policy,
            cache,
        )
        self.outer_process, self.first_step = _masked_process(denoiser), True

    @property
    def process(self) -> Masking:
        return self.outer_process.inner if isinstance(self.outer_process, BlockMasking) else self.outer_process

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(positions, Tensor)
        if sequence_ids is None:
            sequence_ids = torch.arange(len(self.outer_ids), device=z.device)
        span = self._read_range()
        # What is kept must be kept of all rows, so all of them are read.
        read = torch.arange(len(self.outer_ids), device=z.device) if span.num_cached else sequence_ids
        text = self.z[self.outer_ids[read], span.start : span.stop].clone()
        inside = slice(self.block_slice.start - span.start, self.block_slice.stop - span.start)
        mine = sequence_ids if span.num_cached else torch.arange(len(sequence_ids), device=z.device)
        text[mine, inside] = z
        asked = torch.zeros_like(text, dtype=torch.bool)
        asked[mine, inside] = positions
        times = t.new_zeros(len(text), text.shape[1])
        times[mine, inside] = self._time(z, t, sequence_ids).to(t).expand(-1, z.shape[1])
        if isinstance(self.outer_process, BlockMasking):
            stages = AttentionStages.block_causal(
                span.start, span.stop, self.outer_process.block_size, self.block_slice.start, z.device
            )
            context = replace(context, stages=stages)
        if not isinstance(self.cache_policy, NoCache) or isinstance(self.outer_process, BlockMasking):
            others = None if span.num_cached or len(sequence_ids) == len(self.outer_ids) else sequence_ids
            context = replace(context, cache=self.cache.view(span.start, span.num_cached, others))
        self.first_step = False
        return self.denoiser(text, times, asked, context, row_fn=row_fn, sequence_ids=self.outer_ids[read])

    def _time(self, z: Tokens, t: Times, sequence_ids: Tensor) -> Times:
        """A block diffusion model is told the block's time; any other that of the whole text, most of whose
        holes may lie ahead."""
        if isinstance(self.outer_process, BlockMasking):
            return t
        mask = self.vocab.mask_id
        ahead = (self.z[self.outer_ids[sequence_ids], self.block_slice.stop :] == mask).sum(1, keepdim=True)
        masked = (z == mask).sum(1, keepdim=True) + ahead
        return time_from_mask_ratio(self.denoiser, masked, self.num_initial[sequence_ids, None])

    def _read_range(self) -> _ReadRange:
        first, last = self.block_slice.start, self.block_slice.stop
        # A network that predicts the next token is read one place before the block.
        begin = max(0, first - 1) if self.shift_logits else first
        if not isinstance(self.outer_process, BlockMasking):
            return self.cache_policy.read_range(self.first_step, begin, last, self.z.shape[1])
        if self.max_length is not None:
            block = self.outer_process.block_size  # the oldest blocks are forgotten when there are too many
            self.cache.evict_before(max(0, -(-(last - self.max_length) // block) * block))
        read = self.cache.end
        return _ReadRange(read, last, first - read) if read < first else _ReadRange(begin, last, 0)
