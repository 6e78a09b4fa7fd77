"""Train and validation split: whole documents, and parts of very long ones, are held out.

The split is a function of the order and the sizes of the documents, so every machine that prepares a shard
computes the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unmask.data.readers._text import CHUNK_CHARS, TextChunk, split_point

_HASH_RANGE = 1 << 64
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: its multiples modulo 2^64 are spread more evenly than those of any other number."""

_LOOKAHEAD_CHARS = 2 * CHUNK_CHARS
"""Characters at the end of the corpus that can still be moved between the splits."""

_MAX_DRIFT_DOCUMENTS = 2
"""The held-out text may be off its target by this many times the longest document, before chunks are held out (or
not) to correct it. Counting documents alone stays closer than that, but their sizes vary."""

_MIN_SPLITTABLE_CHARS = 1024
"""A shorter document is never divided if there is another one."""


class SplitChunk(NamedTuple):
    """A chunk of the document with index `document_index`, held out or not."""

    chunk: TextChunk
    held_out: bool
    document_index: int

    @property
    def size(self) -> int:
        """Characters of the chunk."""
        return len(self.chunk.text)

    def continues(self, previous: SplitChunk | None) -> bool:
        """Whether it continues the document of the previous chunk, in the same split."""
        return (
            previous is not None
            and previous.document_index == self.document_index
            and previous.held_out == self.held_out
        )


def named_splits(train: Iterable[TextChunk], valid: Iterable[TextChunk]) -> Iterator[SplitChunk]:
    """Every chunk with its split, where the text to hold out is named."""
    document = 0
    for chunks, held_out in ((train, False), (valid, True)):
        for chunk in chunks:
            yield SplitChunk(chunk, held_out, document)
            document += chunk.is_last


def assign_splits(chunks: Iterable[TextChunk], validation_fraction: float) -> Iterator[SplitChunk]:
    """Every chunk with its split: about `validation_fraction` of the text is held out, evenly over the corpus.

    If the held-out text is off its target by more than the longest document, or is less than half or more than
    twice the target, chunks at the end of the corpus are moved to correct it. So a corpus that fits into
    `_LOOKAHEAD_CHARS` never has more held out than the target and one document, and any corpus of a few words or
    of two pairs has both splits. The target is at most half of the text.
    """
    waiting: deque[SplitChunk] = deque()
    waiting_chars = total = held_out = document = 0
    length = longest = 0  # of the current document so far, and of all documents
    threshold = int(validation_fraction * _HASH_RANGE)
    for number, chunk in enumerate(chunks, start=1):
        size = len(chunk.text)
        total += size
        length += size
        longest = max(longest, length)
        chosen = number * _GOLDEN_RATIO % _HASH_RANGE < threshold
        if validation_fraction:
            excess, max_drift = held_out - validation_fraction * total, _MAX_DRIFT_DOCUMENTS * longest
            chosen = excess < -max_drift or (chosen and excess + size <= max_drift)
        waiting.append(SplitChunk(chunk, chosen, document))
        if chunk.is_last:
            document, length = document + 1, 0
        waiting_chars += size
        held_out += size * chosen
        while len(waiting) > 2 and waiting_chars - waiting[0].size >= _LOOKAHEAD_CHARS:
            waiting_chars -= waiting[0].size
            yield waiting.popleft()
    target = min(max(round(validation_fraction * total), 1), total // 2) if validation_fraction else 0
    yield from _rebalance_tail(list(waiting), held_out, target, total, longest)


def _rebalance_tail(
    chunks: list[SplitChunk], held_out: int, target: int, total: int, max_document: int
) -> list[SplitChunk]:
    """The chunks at the end of the corpus, moved between the splits if the held-out text is far from the target."""
    least, most = max(-(-target // 2), target - max_document), min(2 * target, target + max_document)
    for i in reversed(range(len(chunks))):
        if held_out <= most:
            break
        if chunks[i].held_out:
            chunks[i] = chunks[i]._replace(held_out=False)
            held_out -= chunks[i].size
    if held_out >= least:
        return chunks
    for i in reversed(range(len(chunks))):  # hold out whole chunks, as far as they fit
        if not chunks[i].held_out and chunks[i].size <= target - held_out:
            chunks[i] = chunks[i]._replace(held_out=True)
            held_out += chunks[i].size
    return chunks if held_out >= least else _move_to_validation(chunks, target - held_out, total // 2 - held_out)


def _move_to_validation(chunks: list[SplitChunk], target: int, limit: int) -> list[SplitChunk]:
    """Hold out about `target` more characters if all chunks are longer: the end of the last long one.

    Short documents and pairs are not divided: of those of at most `limit` characters, the one closest to the target
    is held out whole.
    """
    free = [i for i in reversed(range(len(chunks))) if not chunks[i].held_out]
    for i in free:
        chunk, _, document = chunks[i]
        size = len(chunk.text)
        if chunk.prompt_chars or size <= target or (size <= _MIN_SPLITTABLE_CHARS and len(free) > 1):
            continue
        stop = split_point(chunk.text, size - target, target // 2)
        first = SplitChunk(TextChunk(chunk.text[:stop], False, chunk.source), False, document)
        second = SplitChunk(chunk._replace(text=chunk.text[stop:]), True, document)
        return [*chunks[:i], first, second, *chunks[i + 1 :]]
    fitting = [i for i in free if chunks[i].size <= limit]
    if fitting:
        best = min(fitting, key=lambda i: abs(chunks[i].size - target))
        chunks[best] = chunks[best]._replace(held_out=True)
    return chunks
