"""What is cached of the beginnings of texts, such as a system prompt: read once, and reused by later requests.

Texts are cut into segments of whole blocks. A segment is stored under a hash of all token ids up to its end, so that
texts that begin alike share segments as far as they agree, and nothing is compared but hashes. The segment that was
used longest ago is dropped first. Samplers ask with `denoiser.new_cache(prefix)`, which only those do whose cache is
exact: a causal network's, a recurrent state, and that of block diffusion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unmask.context import Cache, CacheSegment, Prefix
from unmask.serve._metrics import EngineMetrics

_SEGMENT_TOKENS = 32
"""Tokens of a segment, rounded up to whole blocks."""


class _Part(NamedTuple):
    """A segment of a text: its positions, and the hash of all tokens up to `stop`."""

    start: int
    stop: int
    key: bytes


class PrefixStore:
    """Segments of at most `max_bytes` in all. It is used by one thread, the engine's."""

    def __init__(self, max_bytes: int, metrics: EngineMetrics) -> None:
        self.max_bytes, self._metrics = max_bytes, metrics
        self._segments = OrderedDict[bytes, CacheSegment]()
        self.num_bytes = 0

    def open(self, cache: Cache, prefix: Prefix) -> PrefixReader:
        """Fill an empty cache with what is stored of the prefix; the reader stores the rest as it is read."""
        parts = list(_parts(prefix))
        segments = []
        for part in parts:
            segment = self._segments.get(part.key)
            if segment is None:
                break
            segments.append(segment)
        if segments:
            cache.load(segments)
        self._touch(parts[: len(segments)])
        self._metrics.observe_prefix(cache.end, prefix.tokens.shape[1])
        return PrefixReader(self, cache, parts, len(segments))

    def put(self, parts: list[_Part], segment: CacheSegment) -> None:
        """Store the segment of the last of a text's first `parts`."""
        key = parts[-1].key
        if key not in self._segments:
            self._segments[key] = segment
            self.num_bytes += segment.num_bytes
        self._touch(parts)
        while self.num_bytes > self.max_bytes:
            _, dropped = self._segments.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
        self._metrics.prefix_bytes.set(self.num_bytes)

    def _touch(self, parts: list[_Part]) -> None:
        """The first parts last: a segment is never dropped before those that continue it."""
        for part in reversed(parts):
            if part.key in self._segments:
                self._segments.move_to_end(part.key)


class PrefixReader:
    """A text that is being read: the parts of its prefix are stored as soon as they are cached."""

    def __init__(self, store: PrefixStore, cache: Cache, parts: list[_Part], num_stored: int) -> None:
        self._store, self._cache, self._parts, self._num_stored = store, cache, parts, num_stored

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to store."""
        return self._num_stored == len(self._parts)

    def store_read(self) -> None:
        """Store the parts that have been read since."""
        while not self.finished and self._parts[self._num_stored].stop <= self._cache.end:
            part = self._parts[self._num_stored]
            self._num_stored += 1
            segment = self._cache.segment(part.start, part.stop)
            if segment is not None:
                self._store.put(self._parts[: self._num_stored], segment)

    def pauses(self, length: int) -> list[int]:
        """Where a call that reads `length` tokens must be cut, counted from its first: at the ends of parts, which a
        recurrent state passes only once."""
        if not self._cache.remembers_end_only:
            return []
        stops = [part.stop - self._cache.end for part in self._parts[self._num_stored :]]
        return [stop for stop in stops if stop < length]


def _parts(prefix: Prefix) -> Iterator[_Part]:
    """The parts of the only text of a prefix."""
    (tokens,) = prefix.tokens.cpu().numpy().astype(np.int64)
    size = -(-_SEGMENT_TOKENS // prefix.block_size) * prefix.block_size
    key = blake2b(f"{prefix.block_size} {prefix.offset}".encode()).digest()
    for start, stop in pairwise([0, *range(size - prefix.offset, len(tokens) + 1, size)]):
        key = blake2b(key + tokens[start:stop].tobytes()).digest()
        yield _Part(start, stop, key)
