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
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from unmask.backbones.masks import KVCache, Order
from unmask.diffusion.denoise import Around, Denoise
from unmask.diffusion.noise import substream
from unmask.diffusion.process import BlockMasking, Masking
from unmask.sampling.base import by_name, remaining_time, reversed_process, start
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Confidence
from unmask.sampling.semi import AnyWindowSampler, window_sampler
from unmask.types import Each, Rows, Times, Tokens


class Span(NamedTuple):
    """The places that a call reads, `first` to `last` - 1, and how many of them from the first on are
    kept."""

    first: int
    last: int
    keep: int


@dataclass(frozen=True)
class NoCache:
    """The whole text is read at every step."""

    def span(self, fresh: bool, first: int, last: int, length: int) -> Span:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return Span(0, length, 0)


@dataclass(frozen=True)
class PrefixCache:
    """What is before a block is read once, with the block's first step."""

    def span(self, fresh: bool, first: int, last: int, length: int) -> Span:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return Span(0, length, length) if fresh else Span(first, length, 0)


@dataclass(frozen=True)
class DualCache:
    """What is before and after a block is read once, with the block's first step."""

    def span(self, fresh: bool, first: int, last: int, length: int) -> Span:
        """What is read for the block `first` to `last` - 1 of a text; `fresh`: for the first time."""
        return Span(0, length, length) if fresh else Span(first, last, 0)


AnyCache: TypeAlias = NoCache | PrefixCache | DualCache

CACHES: dict[str, AnyCache] = {"none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
"""What commands and requests call them."""


@dataclass(frozen=True)
class Blockwise:
    """Blocks of `size` tokens, each filled by the `sampler`, whose steps are those of one block.

    Blocks begin at a row's first hole. A block diffusion model has a size of its own, which stays if `size`
    is None, its blocks begin with the text, and its cache is exact. A row ends with the block in which the
    token `stop` was written: what is left of it is filled with that token.
    """

    size: int | None = None
    sampler: AnyWindowSampler | str = Confidence(steps=32)
    cache: AnyCache | str = NoCache()
    stop: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", window_sampler(self.sampler))
        object.__setattr__(self, "cache", by_name(self.cache, CACHES, "cache"))
        if self.size is not None and not (isinstance(self.size, int) and self.size >= 1):
            raise ValueError(f"a block must have at least 1 token; got {self.size!r}")

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step of each block."""
        process = _masking(denoise)
        z = start(denoise, canvas, any_length=isinstance(process, BlockMasking))
        holes = z == denoise.vocab.mask
        origin = holes.int().argmax(1).masked_fill(~holes.any(1), -1)
        if isinstance(process, BlockMasking):  # whose blocks begin with the text, whatever is given of it
            origin = torch.where(origin < 0, -1, origin // process.block * process.block)
        for first in sorted(set(origin.tolist())):  # a row is written alike in any company
            if first >= 0:
                yield from self._rows(denoise, z, canvas, (origin == first).nonzero()[:, 0], first, process)

    def _rows(
        self,
        denoise: Denoise,
        z: Tokens,
        canvas: Canvas,
        rows: Tensor,
        first: int,
        process: Masking | BlockMasking,
    ) -> Iterator[Tokens]:
        """Write the rows whose first block begins at `first`, into `z`."""
        length = z.shape[1]
        size = self._size(process, length)
        plan, sampler = by_name(self.cache, CACHES, "cache"), window_sampler(self.sampler)
        holes, cache = z == denoise.vocab.mask, KVCache()
        for number, begin in enumerate(range(first, length, size)):
            window = slice(begin, min(begin + size, length))
            if not isinstance(process, BlockMasking):
                cache = KVCache()  # an approximation holds for a block
            view = _Window(denoise, z, rows, holes[rows].sum(1), window, plan, cache)
            seeds = tuple(substream(canvas.seeds[row], number) for row in rows.tolist())
            for written in sampler.run(view, Canvas(z[rows, window], seeds)):
                z[rows, window] = written
                yield z.clone()
            if self.stop is None:
                continue
            ended = ((z[rows] == self.stop) & holes[rows])[:, window].any(1)
            if bool(ended.any()):
                self._end(z, rows[ended], holes)
                yield z.clone()
                rows = rows[~ended]
                cache.only((~ended).nonzero()[:, 0])
                if len(rows) == 0:
                    return

    def _size(self, process: Masking | BlockMasking, length: int) -> int:
        if not isinstance(process, BlockMasking):
            return self.size or length
        if self.size not in (None, process.block):
            raise ValueError(f"the model writes blocks of {process.block} tokens; got a size of {self.size}")
        return process.block

    def _end(self, z: Tokens, rows: Tensor, holes: Tensor) -> None:
        """Fill all that was to be written after the first stop of a row."""
        assert self.stop is not None
        stops = (z[rows] == self.stop) & holes[rows]
        after = (stops.cumsum(1) > 0) & holes[rows]
        z[rows] = z[rows].masked_fill(after, self.stop)


def _masking(denoise: Denoise) -> Masking | BlockMasking:
    process = denoise.process
    return process if isinstance(process, BlockMasking) else reversed_process(denoise, Masking)


class _Window(Around):
    """A network as it looks from inside a block: asked about the block, it reads whatever else it needs."""

    def __init__(
        self,
        denoise: Denoise,
        z: Tokens,
        rows: Tensor,
        holes: Tensor,
        window: slice,
        plan: AnyCache,
        cache: KVCache,
    ) -> None:
        super().__init__(denoise)
        self.z, self.rows, self.holes, self.window, self.plan, self.cache = (
            z,
            rows,
            holes,
            window,
            plan,
            cache,
        )
        self.outer, self.fresh = _masking(denoise), True

    @property
    def process(self) -> Masking:
        return self.outer.within if isinstance(self.outer, BlockMasking) else self.outer

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        assert isinstance(rows, Tensor)
        if which is None:
            which = torch.arange(len(self.rows), device=z.device)
        span = self._span()
        # What is kept must be kept of all rows, so all of them are read.
        read = torch.arange(len(self.rows), device=z.device) if span.keep else which
        text = self.z[self.rows[read], span.first : span.last].clone()
        inside = slice(self.window.start - span.first, self.window.stop - span.first)
        mine = which if span.keep else torch.arange(len(which), device=z.device)
        text[mine, inside] = z
        asked = torch.zeros_like(text, dtype=torch.bool)
        asked[mine, inside] = rows
        times = t.new_zeros(len(text), text.shape[1])
        times[mine, inside] = self._time(z, t, which).to(t).expand(-1, z.shape[1])
        if isinstance(self.outer, BlockMasking):
            context["order"] = Order.block_by_block(
                span.first, span.last, self.outer.block, self.window.start, z.device
            )
        if not isinstance(self.plan, NoCache) or isinstance(self.outer, BlockMasking):
            others = None if span.keep or len(which) == len(self.rows) else which
            context["beside"] = self.cache.beside(span.first, span.keep, others)
        self.fresh = False
        return self.denoise(text, times, asked, each=each, which=self.rows[read], **context)

    def _time(self, z: Tokens, t: Times, which: Tensor) -> Times:
        """A block diffusion model is told the block's time; any other that of the whole text, most of whose
        holes may lie ahead."""
        if isinstance(self.outer, BlockMasking):
            return t
        mask = self.vocab.mask
        ahead = (self.z[self.rows[which], self.window.stop :] == mask).sum(1, keepdim=True)
        masked = (z == mask).sum(1, keepdim=True) + ahead
        return remaining_time(self.denoise, masked, self.holes[which, None])

    def _span(self) -> Span:
        first, last = self.window.start, self.window.stop
        # A network that predicts the next token is read one place before the block.
        begin = max(0, first - 1) if self.shifted else first
        if not isinstance(self.outer, BlockMasking):
            return self.plan.span(self.fresh, begin, last, self.z.shape[1])
        if self.max_length is not None:
            block = self.outer.block  # the oldest blocks are forgotten when there are too many
            self.cache.forget(max(0, -(-(last - self.max_length) // block) * block))
        read = self.cache.end
        return Span(read, last, first - read) if read < first else Span(begin, last, 0)
