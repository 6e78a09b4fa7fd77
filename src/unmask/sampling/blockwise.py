"""Block by block, from left to right: each block is filled by a sampler that sees nothing else.

Three families work like this. They differ in what the network reads at a step, and in what is cached:

* LLaDA reads the whole text at each step, later blocks as masks;
* Fast-dLLM reads it once per block. At the other steps, keys and values before the block (`PrefixCache`) or on
  both sides of it (`DualCache`) are those of that call: an approximation, because they would have changed;
* a block diffusion model never attends to later blocks, so what is cached of finished blocks stays exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.context import AttentionStages, Cache, Context, Prefix
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.noise import derive_seed
from unmask.diffusion.process import BlockMasking, Masking, PerTokenMasking
from unmask.sampling._unmasking import IntArray, time_from_mask_ratio, to_device
from unmask.sampling.base import Sampler, init_tokens, require_process, resolve_inner_sampler, resolve_option
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Confidence
from unmask.types import Positions, Queries, RowFn, Times, Tokens


class _ReadRange(NamedTuple):
    """The positions that a call reads, and how many of them, from the first on, are cached."""

    start: int
    stop: int
    num_cached: int


@dataclass(frozen=True)
class NoCache:
    """The whole text is read at every step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        return _ReadRange(0, length, 0)


@dataclass(frozen=True)
class PrefixCache:
    """Everything before a block is read once, at the block's first step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        return _ReadRange(0, length, length) if first_step else _ReadRange(start, length, 0)


@dataclass(frozen=True)
class DualCache:
    """Everything before and after a block is read once, at the block's first step."""

    def read_range(self, first_step: bool, start: int, stop: int, length: int) -> _ReadRange:
        return _ReadRange(0, length, length) if first_step else _ReadRange(start, stop, 0)


_CachePolicy: TypeAlias = NoCache | PrefixCache | DualCache

CACHE_POLICIES: dict[str, _CachePolicy] = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
"""The caches of masked diffusion, by name."""


@dataclass(frozen=True)
class Blockwise(Sampler):
    """Blocks from left to right, each filled by another sampler.

    Blocks begin at a sequence's first masked position. Those of a block diffusion model begin with the text, and its
    cache is exact. If such a model predicts the next token (Fast-dLLM v2), the first token of a block is written before
    the others: it follows from the blocks before it alone.
    """

    processes = (Masking, BlockMasking, PerTokenMasking)

    block_size: int | None = None
    """Tokens per block; None is the model's own block size, or the whole text if it has none."""
    sampler: Sampler | str = Confidence(steps=32)
    """What fills each block, with its number of steps per block: a sampler of masked diffusion, or its name."""
    cache: _CachePolicy | str = NoCache()
    """What the steps of a block do not read again: "none", "prefix" or "dual"; block diffusion ignores it."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text: a sequence stops as soon as one was written and nothing before it will change, and the
    rest is filled with it. Empty: no end."""
    sub_block_size: int | None = None
    """Blocks are filled in parts of this many tokens, from left to right, while the network reads the whole block;
    None: as a whole."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", resolve_inner_sampler(self.sampler))
        object.__setattr__(self, "cache", resolve_option(self.cache, CACHE_POLICIES, "cache"))
        for size, name in ((self.block_size, "block"), (self.sub_block_size, "sub-block")):
            if size is not None and not (isinstance(size, int) and size >= 1):
                raise ValueError(f"a {name} must have at least 1 token; got {size!r}")

    @property
    def inner(self) -> Sampler:
        return resolve_inner_sampler(self.sampler)

    @property
    def steps(self) -> int | None:
        return self.inner.steps

    @property
    def may_remask(self) -> bool:
        return self.inner.may_remask

    @property
    def order_follows(self) -> Literal["predictions", "noise", "tokens"]:
        return self.inner.order_follows

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        process = require_process(denoiser, Masking, BlockMasking, PerTokenMasking)
        z = init_tokens(denoiser, canvas, any_length=process.block_size is not None)
        masked = canvas.host_mask(denoiser.vocab.mask_id)
        canvas, has_holes = replace(canvas, masked=masked), masked.any(1)
        first = masked.argmax(1)
        if isinstance(process, BlockMasking):
            first = np.array([process.first_block(int(position))[0] for position in first])
        for start in sorted(set(first[has_holes].tolist())):  # sequences of one start share calls
            yield from self._run_group(denoiser, z, canvas, np.flatnonzero(has_holes & (first == start)), start)

    def _run_group(
        self, denoiser: DenoiserLike, z: Tokens, canvas: Canvas, sequences: IntArray, first_start: int
    ) -> Iterator[Tokens]:
        """Fill the sequences whose first block begins at `first_start`, in `z`."""
        length, exact = z.shape[1], denoiser.process.block_size is not None
        size = self._resolve_block_size(denoiser.process.block_size, length)
        if isinstance(denoiser.process, PerTokenMasking) and first_start + size < length:
            raise ValueError(
                "a model with a schedule for each token writes all positions at once, not block by block:"
                " leave block_size out"
            )
        policy = resolve_option(self.cache, CACHE_POLICIES, "cache")
        on_host = canvas.host_mask(denoiser.vocab.mask_id)
        masked, cached = torch.from_numpy(on_host).to(z.device), exact or not isinstance(policy, NoCache)
        prefix = self._prefix(denoiser, z[to_device(sequences, z.device)], first_start)
        cache = denoiser.new_cache(prefix) if cached else None
        for number, begin in enumerate(range(first_start, length, size)):
            block = slice(begin, min(begin + size, length))
            if cached and not exact:
                cache = denoiser.new_cache()  # an approximate cache holds for one block
            ids = to_device(sequences, z.device)
            seeds = [derive_seed(canvas.seeds[b], number) for b in sequences]
            views = (
                _BlockView(denoiser, z, ids, masked[ids].sum(1), part, read, policy, cache)
                for part, read in self._parts(block, exact and denoiser.shift_logits)
            )
            for _ in self._fill_parts(views, seeds, on_host[sequences]):
                yield z.clone()
                if self._may_stop(z[ids, block], masked[ids, block], denoiser.vocab.mask_id):
                    break
            ended = self._has_ended(z[ids, block], masked[ids, block]) if self.end_ids else np.False_
            if ended.any():
                self._fill_after_end(z, to_device(sequences[ended], z.device), masked)
                yield z.clone()
                sequences = sequences[~ended]
                if cache is not None:
                    cache.select(to_device(np.flatnonzero(~ended), z.device))
                if len(sequences) == 0:
                    return

    def _prefix(self, denoiser: DenoiserLike, z: Tokens, start: int) -> Prefix | None:
        """The given tokens before the first block, if the network never forgets them nor looks ahead."""
        process, longest = denoiser.process, denoiser.max_length
        if not isinstance(process, BlockMasking) or (longest is not None and z.shape[1] > longest):
            return None
        return Prefix(z[:, :start], process.block_size, process.first_block(start)[1])

    def _fill_parts(
        self, views: Iterable[_BlockView], seeds: Sequence[int], masked: NDArray[np.bool_]
    ) -> Iterator[Tokens]:
        """Fill the parts of a block in the text of their views; `masked` [b, L] is that of the whole text."""
        for index, view in enumerate(views):
            part_seeds = seeds if index == 0 else [derive_seed(seed, index) for seed in seeds]
            canvas = Canvas(view.text[view.outer_ids, view.part], tuple(part_seeds), masked[:, view.part])
            for tokens in self.inner.run(view, canvas):
                view.text[view.outer_ids, view.part] = tokens
                yield tokens

    def _parts(self, block: slice, first_alone: bool) -> Iterator[tuple[slice, slice]]:
        """The parts that are filled one after the other, each with what the network reads meanwhile."""
        size = self.sub_block_size or block.stop - block.start
        if first_alone:
            first = slice(block.start, block.start + 1)
            yield first, first
        for begin in range(block.start, block.stop, size):
            start = begin + (first_alone and begin == block.start)
            if start < min(begin + size, block.stop):
                yield slice(start, min(begin + size, block.stop)), block

    def _may_stop(self, block: Tokens, masked: Tensor, mask_id: int) -> bool:
        """Whether all sequences have ended in the block, and nothing before their end can still change."""
        if not self.end_ids or self.may_remask:
            return False
        before_mask = (block == mask_id).cumsum(1) == 0
        return bool(self._has_ended(block, masked & before_mask).all())

    def _has_ended(self, block: Tokens, masked: Tensor) -> NDArray[np.bool_]:
        """Which sequences have written an end in the block."""
        is_end = torch.isin(block, torch.tensor(self.end_ids, device=block.device)) & masked
        ended: NDArray[np.bool_] = is_end.any(1).cpu().numpy()
        return ended

    def _resolve_block_size(self, model_block: int | None, length: int) -> int:
        if model_block is None:
            return self.block_size or length
        if self.block_size not in (None, model_block):
            raise ValueError(f"the model writes blocks of {model_block} tokens; got a size of {self.block_size}")
        return model_block

    def _fill_after_end(self, z: Tokens, sequence_ids: Tensor, masked: Tensor) -> None:
        """Fill everything that was to be written after a sequence's first end with that token."""
        text, writable = z[sequence_ids], masked[sequence_ids]
        is_end = torch.isin(text, torch.tensor(self.end_ids, device=z.device)) & writable
        end = text.gather(1, is_end.int().argmax(1, keepdim=True))
        z[sequence_ids] = torch.where((is_end.cumsum(1) > 0) & writable, end, text)


class _BlockView(DenoiserWrapper):
    """A denoiser of `part` of a block: called with its tokens, it reads the block and whatever else the network needs.

    `sequence_ids` of a call count the sequences of the view, which are the `outer_ids` of the canvas `text`.
    """

    def __init__(
        self,
        denoiser: DenoiserLike,
        text: Tokens,
        outer_ids: Tensor,
        num_initial: Tensor,
        part: slice,
        block: slice,
        cache_policy: _CachePolicy,
        cache: Cache | None,
    ) -> None:
        super().__init__(denoiser)
        self.text, self.outer_ids, self.num_initial, self.part, self.block = text, outer_ids, num_initial, part, block
        self.cache_policy, self.cache, self.first_step = cache_policy, cache, True
        process = denoiser.process
        assert isinstance(process, Masking | BlockMasking | PerTokenMasking)  # as `Blockwise.run` has checked
        self.outer_process, self.model_block = process, process.block_size
        self.offset = process.first_block(block.start)[1] if isinstance(process, BlockMasking) else 0

    @property
    def process(self) -> Masking | PerTokenMasking:
        return self.outer_process.inner

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
        everyone = torch.arange(len(self.outer_ids), device=z.device)
        called = everyone if sequence_ids is None else sequence_ids
        span = self._read_range()
        # A call that fills the cache reads all sequences; otherwise only those that it is called with.
        read = everyone if span.num_cached else called
        rows = called if span.num_cached else torch.arange(len(called), device=z.device)
        inside = slice(self.part.start - span.start, self.part.stop - span.start)
        text = self.text[self.outer_ids[read], span.start : span.stop].clone()
        text[rows, inside] = z
        times = t.new_zeros(text.shape)
        times[rows, inside] = self._network_time(z, t, called).to(t).expand(-1, z.shape[1])
        context = self._context(context, span, None if len(called) == len(everyone) else called, z.device)
        self.first_step = False
        return self.denoiser(
            text,
            times,
            _placed(positions, rows if len(called) < len(read) else None, text.shape[1], inside.start),
            context,
            row_fn=row_fn,
            sequence_ids=self.outer_ids[read],
        )

    def _context(
        self, context: Context, span: _ReadRange, sequence_ids: Tensor | None, device: torch.device
    ) -> Context:
        """The attention stages of a block diffusion model, and the cache."""
        if self.model_block is not None:
            stages = AttentionStages.block_causal(
                span.start, span.stop, self.model_block, self.block.start, device, self.offset
            )
            context = replace(context, stages=stages)
        if self.cache is not None:
            cached = None if span.num_cached else sequence_ids
            context = replace(context, cache=self.cache.view(span.start, span.num_cached, cached))
        return context

    def _network_time(self, z: Tokens, t: Times, sequence_ids: Tensor) -> Times:
        """The time of the block for a block diffusion model, and where there can only be one block; that of the whole
        text, with the masked positions of later blocks, for any other."""
        if self.model_block is not None or isinstance(self.outer_process, PerTokenMasking):
            return t
        mask = self.vocab.mask_id
        later = (self.text[self.outer_ids[sequence_ids], self.part.stop :] == mask).sum(1, keepdim=True)
        num_masked = (z == mask).sum(1, keepdim=True) + later
        return time_from_mask_ratio(self.denoiser, num_masked, self.num_initial[sequence_ids, None])

    def _read_range(self) -> _ReadRange:
        start, stop = self.block.start, self.block.stop
        # A network that predicts the next token needs the position before the block.
        read_start = max(0, start - 1) if self.shift_logits else start
        if self.model_block is None:
            return self.cache_policy.read_range(self.first_step, read_start, stop, self.text.shape[1])
        assert self.cache is not None  # block diffusion always has one
        if self.max_length is not None:  # evict the oldest blocks that no longer fit
            first = -(-(stop + self.offset - self.max_length) // self.model_block) * self.model_block - self.offset
            self.cache.evict_before(max(0, first))
        end = self.cache.end
        return _ReadRange(end, stop, start - end) if end < start else _ReadRange(read_start, stop, 0)


def _placed(positions: Positions, rows: Tensor | None, length: int, start: int) -> Positions:
    """Positions of a block that begins at `start` as those of a text of `length` tokens.

    `rows` are the block's sequences among those of the text; None: they are the same.
    """
    if rows is None and isinstance(positions, Queries):
        return positions.in_longer(length, start)
    sequence, position = positions.nonzero(as_tuple=True) if isinstance(positions, Tensor) else positions
    return sequence if rows is None else rows[sequence], position + start
