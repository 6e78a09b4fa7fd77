"""Which text is held out for validation: whole documents, and stretches of very long ones.

Which ones follows from their order and their sizes alone, so every machine that prepares a part of a corpus
agrees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unmask.data.readers.text import CHUNK_CHARS, TextChunk, split_point

_HASH_RANGE = 1 << 64
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""The golden ratio's share of a turn: its multiples fill the circle more evenly than any other number's."""

_LOOKAHEAD_CHARS = 2 * CHUNK_CHARS
"""Characters at the end of the corpus that can still be moved from split to split."""

_MAX_DRIFT_DOCUMENTS = 2
"""So many times its longest document a corpus may have been off its share on the way, before it is brought
back; the numbers of documents alone stay closer than that, but their sizes may not."""

_MIN_SPLITTABLE_CHARS = 1024
"""Characters of a document that is never cut if there is another one."""


class SplitChunk(NamedTuple):
    """A piece of the corpus' `document`-th document, held out or not."""

    chunk: TextChunk
    held_out: bool
    document_index: int

    def continues(self, previous: SplitChunk | None) -> bool:
        """Whether it goes on where the piece before it in the corpus stopped, in the same split."""
        return (
            previous is not None
            and previous.document_index == self.document_index
            and previous.held_out == self.held_out
        )


def assign_splits(chunks: Iterable[TextChunk], validation_fraction: float) -> Iterator[SplitChunk]:
    """Every piece with its split: about `share` of the text is held out, evenly from the whole corpus.

    If that is off by more than the longest document, or gives less than half or more than twice of what is
    due, the end of the corpus makes up for it: a corpus that fits into `_LOOKAHEAD_CHARS` never has more held out
    than asked for and one document, and any of a few words, or of two pairs, has both splits. Not more than
    half of it is ever due.
    """
    held: deque[SplitChunk] = deque()
    waiting = total = held_out = document = 0
    length = longest = 0  # of the document so far, and of all documents
    threshold = int(validation_fraction * _HASH_RANGE)
    for number, piece in enumerate(chunks, start=1):
        size = len(piece.text)
        total += size
        length += size
        longest = max(longest, length)
        chosen = number * _GOLDEN_RATIO % _HASH_RANGE < threshold
        if validation_fraction:
            excess = held_out - validation_fraction * total
            chosen = excess < -_MAX_DRIFT_DOCUMENTS * longest or (
                chosen and excess + size <= _MAX_DRIFT_DOCUMENTS * longest
            )
        placed = SplitChunk(piece, chosen, document)
        if piece.is_last:
            document, length = document + 1, 0
        waiting += size
        held_out += size * placed.held_out
        held.append(placed)
        while len(held) > 2 and waiting - len(held[0].chunk.text) >= _LOOKAHEAD_CHARS:
            waiting -= len(held[0].chunk.text)
            yield held.popleft()
    due = min(max(round(validation_fraction * total), 1), total // 2) if validation_fraction else 0
    yield from _rebalance_tail(list(held), held_out, due, total, longest)


def _rebalance_tail(
    chunks: list[SplitChunk], held_out: int, target: int, total: int, max_document: int
) -> list[SplitChunk]:
    """The end of the corpus, where more or less is held out if it is far from what is due."""
    least, most = max(-(-target // 2), target - max_document), min(2 * target, target + max_document)
    for i in reversed(range(len(chunks))):
        size = len(chunks[i].chunk.text)
        if held_out <= most:
            break
        if chunks[i].held_out:
            chunks[i] = chunks[i]._replace(held_out=False)
            held_out -= size
    if held_out >= least:
        return chunks
    for i in reversed(range(len(chunks))):  # whole pieces, as far as they fit
        size = len(chunks[i].chunk.text)
        if not chunks[i].held_out and size <= target - held_out:
            chunks[i] = chunks[i]._replace(held_out=True)
            held_out += size
    return chunks if held_out >= least else _move_to_validation(chunks, target - held_out, total // 2 - held_out)


def _move_to_validation(chunks: list[SplitChunk], target: int, limit: int) -> list[SplitChunk]:
    """Hold out about `due` more characters where no piece is so short: the end of the last long one.

    A short document or a pair is not cut: of those that are not more than `most`, the one that comes closest
    to what is due is held out whole.
    """
    free = [i for i in reversed(range(len(chunks))) if not chunks[i].held_out]
    for i in free:
        piece, _, document = chunks[i]
        size = len(piece.text)
        if piece.prompt_chars or size <= target or (size <= _MIN_SPLITTABLE_CHARS and len(free) > 1):
            continue
        stop = split_point(piece.text, size - target, target // 2)
        kept = SplitChunk(TextChunk(piece.text[:stop], False, piece.source), False, document)
        return [
            *chunks[:i],
            kept,
            SplitChunk(piece._replace(text=piece.text[stop:]), True, document),
            *chunks[i + 1 :],
        ]
    fitting = [i for i in free if len(chunks[i].chunk.text) <= limit]
    if fitting:
        best = min(fitting, key=lambda i: abs(len(chunks[i].chunk.text) - target))
        chunks[best] = chunks[best]._replace(held_out=True)
    return chunks
