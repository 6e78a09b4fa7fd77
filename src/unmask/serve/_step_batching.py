"""Continuous batching at step granularity: concurrent samplers share forward passes.

Samplers and likelihood estimators call a denoiser and wait for its output. Here each of them runs in a
greenlet, and its denoiser hands the call to the scheduler that runs the greenlet. So samplers need no
code for batching, and join and leave batches between any two calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from unmask.context import AttentionStages, Cache, Context, Prefix
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper, MergeableRowFn
from unmask.guidance.regex.limits import YIELD_HOOK
from unmask.serve._prefix_store import PrefixReader, PrefixStore
from unmask.types import Positions, RowFn, Times, Tokens

_MAX_BATCH_LOGITS = 1 << 26
"""Logits per forward pass: a quarter of a gigabyte of float32."""
_MAX_ROW_FN_LOGITS = 1 << 22
"""Logits per merged row function; sampling takes several float64 copies."""
_MIN_BUCKET_LENGTH = 64
"""Sequences up to this length share forward passes."""
_MIN_CACHED_LENGTH = 256
"""Caches up to this length share forward passes; longer ones, if their lengths differ by less than a factor of two."""

_PAUSED = object()


@dataclass(frozen=True)
class ForwardCall:
    """A pending call of the denoiser."""

    z: Tokens
    t: Times
    positions: Positions
    row_fn: RowFn | None
    context: Context = Context()
    network: DenoiserLike | None = None
    """What is called; None: the engine's model."""

    @cached_property
    def bucket(self) -> Hashable | None:
        """Calls of one bucket can be batched: the lengths of their texts differ by less than a factor of two.

        None for a call whose context cannot be merged with others.
        """
        view = self.context.cache
        if self.context.is_empty:
            return _bucket_length(self.z.shape[1], _MIN_BUCKET_LENGTH)
        if view is None or view.batch_key is None or not replace(self.context, cache=None, stages=None).is_empty:
            return None
        return view.batch_key, self.context.stages is None, _bucket_length(view.cached_length, _MIN_CACHED_LENGTH)

    def fits(self, other: ForwardCall) -> bool:
        """Whether it can be in a batch with another. The calls of a text with a cache differ more than texts do: from
        a whole prompt to a token. So their lengths differ by a factor of two at most, too."""
        if self.bucket is None or self.bucket != other.bucket or self.network != other.network:
            return False
        return self.context.is_empty or self.z.shape[1] <= 2 * other.z.shape[1] <= 4 * self.z.shape[1]

    def unqueried(self, begin: int, end: int) -> ForwardCall:
        """The same for some of its tokens, which are read and not asked for."""
        t = self.t if self.t.shape[1] == 1 else self.t[:, begin:end]
        nothing = torch.zeros_like(self.z[:, begin:end], dtype=torch.bool)
        return ForwardCall(self.z[:, begin:end], t, nothing, None, self.context)

    def rest(self, begin: int) -> ForwardCall:
        """The same from a token on, after which all its queries are."""
        if begin == 0:
            return self
        t = self.t if self.t.shape[1] == 1 else self.t[:, begin:]
        if isinstance(self.positions, Tensor):
            positions: Positions = self.positions[:, begin:]
        else:
            positions = self.positions[0], self.positions[1] - begin
        return replace(self, z=self.z[:, begin:], t=t, positions=positions)

    @cached_property
    def num_queries(self) -> int:
        """The number of rows of log_x in its output."""
        return int(self.positions.sum()) if isinstance(self.positions, Tensor) else len(self.positions[0])


class SamplerCoroutine:
    """A job in a greenlet; `pending_call` is the denoiser call that it waits for.

    It is `paused` if its own computations go beyond `slice_deadline`, a time of `time.monotonic`.
    """

    def __init__(
        self, work: Callable[[DenoiserLike], None], denoiser: DenoiserLike, prefixes: PrefixStore | None = None
    ) -> None:
        self.pending_call: ForwardCall | None = None
        self.paused = False
        self.slice_deadline = float("inf")

        def run() -> None:
            YIELD_HOOK.set(self._pause)
            work(_YieldingDenoiser(denoiser, prefixes))

        self._greenlet = greenlet(run)

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self.pending_call is None and not self.paused

    def start(self) -> None:
        """Run up to the first call; errors of the job are raised here."""
        self._switch()

    def send(self, output: Tensor) -> None:
        """Return the output of the pending call, and run up to the next one."""
        self._switch(output)

    def resume(self) -> None:
        """Continue after a pause."""
        self._switch()

    def cancel(self) -> None:
        """Stop the job; its `finally` blocks are run."""
        self.pending_call, self.paused = None, False
        self._greenlet.throw(GreenletExit)

    def _switch(self, *output: Tensor) -> None:
        self.pending_call, self.paused = None, False
        result = self._greenlet.switch(*output)
        self.pending_call, self.paused = (None, True) if result is _PAUSED else (result, False)

    def _pause(self) -> None:
        if time.monotonic() >= self.slice_deadline:
            _switch_to_parent(_PAUSED)


class _YieldingDenoiser(DenoiserWrapper):
    """A denoiser that hands its calls to the parent greenlet and waits for the output.

    What is cached of a text's prefix comes from a store, and goes there when it is read.
    """

    def __init__(self, denoiser: DenoiserLike, prefixes: PrefixStore | None) -> None:
        super().__init__(denoiser)
        self._prefixes = prefixes
        self._reader: PrefixReader | None = None

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        cache = self.denoiser.new_cache()
        if prefix is not None and self._prefixes is not None and len(prefix.tokens) == 1:
            self._reader = self._prefixes.open(cache, prefix)
        return cache

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
        call = ForwardCall(z, t, positions, row_fn, context)
        reader, begin = self._reader, 0
        if reader is None or reader.finished or context.cache is None:
            return _forward(call)
        for end in reader.pauses(z.shape[1]):
            _forward(call.unqueried(begin, end))
            reader.store_read()
            begin = end
        output = _forward(call.rest(begin))
        reader.store_read()
        return output


def call_network(network: DenoiserLike, z: Tokens, positions: Positions) -> Tensor:
    """In a job: the answer of another network than the engine's model about clean texts, which calls of jobs share."""
    return _forward(ForwardCall(z, torch.zeros(len(z), 1, device=z.device), positions, None, network=network))


def _forward(call: ForwardCall) -> Tensor:
    output: Tensor = _switch_to_parent(call)
    return output


def _switch_to_parent(value: object) -> Any:
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(value)


def select_batch(calls: Sequence[ForwardCall], max_batch: int, vocab_size: int) -> list[int]:
    """The indices of the calls in the next batch: the first one, and those that can be batched with it."""
    first = calls[0]
    selected, num_sequences, logits = [0], len(first.z), first.num_queries * vocab_size
    for index, other in enumerate(calls[1:], start=1):
        if not first.fits(other):
            continue
        num_sequences, logits = num_sequences + len(other.z), logits + other.num_queries * vocab_size
        if num_sequences > max_batch or logits > _MAX_BATCH_LOGITS:
            break
        selected.append(index)
    return selected


def run_batch(denoiser: DenoiserLike, calls: Sequence[ForwardCall]) -> list[Tensor]:
    """The outputs of calls that fit each other, from one forward pass.

    Row functions with the same `batch_key` are merged and evaluated together. If it fails, the caches of several calls
    are as before.
    """
    denoiser = calls[0].network or denoiser
    if len(calls) == 1 and not isinstance(calls[0].row_fn, MergeableRowFn):
        (one,) = calls
        return [denoiser(one.z, one.t, one.positions, context=one.context, row_fn=one.row_fn)]
    groups = _group_by_key(calls, _MAX_ROW_FN_LOGITS // denoiser.vocab.size)
    grouped = [[calls[index] for index in group] for group in groups]
    merged = _merge([call for group in grouped for call in group])
    log_x = denoiser(merged.z, merged.t, merged.positions, merged.context)
    parts = torch.split(log_x, [sum(call.num_queries for call in group) for group in grouped])
    outputs = [output for group, part in zip(grouped, parts, strict=True) for output in _apply_row_fn(group, part)]
    if merged.context.cache is not None:
        merged.context.cache.commit()
    order = [index for group in groups for index in group]
    return [output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])]


def _group_by_key(calls: Sequence[ForwardCall], max_queries: int) -> list[list[int]]:
    """Indices of calls whose row functions can be merged, in groups of at most `max_queries` rows if possible."""
    groups: list[list[int]] = []
    growing: dict[Hashable, tuple[list[int], int]] = {}
    for index, call in enumerate(calls):
        key = call.row_fn.batch_key if isinstance(call.row_fn, MergeableRowFn) else index
        group, num_queries = growing.get(key, ([], 0))
        if not group or num_queries + call.num_queries > max_queries:
            group, num_queries = [], 0
            groups.append(group)
        group.append(index)
        growing[key] = group, num_queries + call.num_queries
    return groups


def _apply_row_fn(calls: Sequence[ForwardCall], log_x: Tensor) -> Sequence[Tensor]:
    """The outputs of calls with one `batch_key`, from their rows of log_x."""
    first, *others = (call.row_fn for call in calls)
    if first is None:
        return [log_x]
    sizes = [call.num_queries for call in calls]
    if others:
        assert isinstance(first, MergeableRowFn)
        first = first.merge(others, sizes)
    return torch.split(first(log_x, slice(None)), sizes)


def _merge(calls: Sequence[ForwardCall]) -> ForwardCall:
    """One call whose log_x is that of all calls, one after another; sequences are padded to one length."""
    if len(calls) == 1:
        return calls[0]
    lengths = [call.z.shape[1] for call in calls]
    longest = max(lengths)
    z = torch.cat([_pad(call.z, longest) for call in calls])
    time_per_position = any(call.t.shape[1] > 1 for call in calls)
    t = torch.cat(
        [
            _pad(call.t.expand(-1, length), longest) if time_per_position else call.t
            for call, length in zip(calls, lengths, strict=True)
        ]
    )
    return ForwardCall(z, t, _merge_positions(calls, longest), None, _merge_contexts(calls), calls[0].network)


def _merge_contexts(calls: Sequence[ForwardCall]) -> Context:
    """Padding of texts, or the caches and stages of all calls."""
    shapes = [(call.z.shape[0], call.z.shape[1]) for call in calls]
    view, *others = (call.context.cache for call in calls)
    if view is not None:
        stages = [call.context.stages for call in calls if call.context.stages is not None]
        return Context(
            stages=AttentionStages.stacked(stages, shapes) if stages else None, cache=view.merge(others, shapes)
        )
    lengths = [length for _, length in shapes]
    if min(lengths) == max(lengths):
        return Context()
    valid = [_pad(torch.ones_like(call.z, dtype=torch.bool), max(lengths)) for call in calls]
    return Context(valid=torch.cat(valid))


def _merge_positions(calls: Sequence[ForwardCall], longest: int) -> Positions:
    """The queries of all calls: as booleans, or as indices if some calls have indices, as guidance does."""
    masks = [call.positions for call in calls if isinstance(call.positions, Tensor)]
    if len(masks) == len(calls):
        return torch.cat([_pad(mask, longest) for mask in masks])
    sequences, positions, offset = [], [], 0
    for call in calls:
        queries = call.positions
        sequence, position = queries.nonzero(as_tuple=True) if isinstance(queries, Tensor) else queries
        sequences.append(sequence + offset)
        positions.append(position)
        offset += len(call.z)
    return torch.cat(sequences), torch.cat(positions)


def _pad(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[1]))


def _bucket_length(length: int, smallest: int) -> int:
    return max(smallest, 1 << (max(1, length) - 1).bit_length())
