"""Which text is held out for validation: whole documents, and stretches of very long ones.

Which ones follows from their order and their sizes alone, so every machine that prepares a part of a corpus
agrees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from unmask.data.formats import PIECE, Piece, cut

_TURN = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio's share of a turn: its multiples fill the circle more evenly than any other number's."""

HELD_BACK = 2 * PIECE
"""Characters at the end of the corpus that can still be moved from split to split."""

ASTRAY = 2
"""So many times its longest document a corpus may have been off its share on the way, before it is brought
back; the numbers of documents alone stay closer than that, but their sizes may not."""

SHORT = 1024
"""Characters of a document that is never cut if there is another one."""


class Placed(NamedTuple):
    """A piece of the corpus' `document`-th document, held out or not."""

    piece: Piece
    held_out: bool
    document: int

    def follows(self, before: Placed | None) -> bool:
        """Whether it goes on where the piece before it in the corpus stopped, in the same split."""
        return before is not None and before.document == self.document and before.held_out == self.held_out


def place(pieces: Iterable[Piece], share: float) -> Iterator[Placed]:
    """Every piece with its split: about `share` of the text is held out, evenly from the whole corpus.

    If that is off by more than the longest document, or gives less than half or more than twice of what is
    due, the end of the corpus makes up for it: a corpus that fits into `HELD_BACK` never has more held out
    than asked for and one document, and any of a few words, or of two pairs, has both splits. Not more than
    half of it is ever due.
    """
    held: deque[Placed] = deque()
    waiting = total = held_out = document = 0
    length = longest = 0  # of the document so far, and of all documents
    threshold = int(share * _TURN)
    for number, piece in enumerate(pieces, start=1):
        size = len(piece.text)
        total += size
        length += size
        longest = max(longest, length)
        chosen = number * _GOLDEN % _TURN < threshold
        if share:
            excess = held_out - share * total
            chosen = excess < -ASTRAY * longest or (chosen and excess + size <= ASTRAY * longest)
        placed = Placed(piece, chosen, document)
        if piece.ends:
            document, length = document + 1, 0
        waiting += size
        held_out += size * placed.held_out
        held.append(placed)
        while len(held) > 2 and waiting - len(held[0].piece.text) >= HELD_BACK:
            waiting -= len(held[0].piece.text)
            yield held.popleft()
    due = min(max(round(share * total), 1), total // 2) if share else 0
    yield from _corrected(list(held), held_out, due, total, longest)


def _corrected(placed: list[Placed], held_out: int, due: int, total: int, longest: int) -> list[Placed]:
    """The end of the corpus, where more or less is held out if it is far from what is due."""
    least, most = max(-(-due // 2), due - longest), min(2 * due, due + longest)
    for i in reversed(range(len(placed))):
        size = len(placed[i].piece.text)
        if held_out <= most:
            break
        if placed[i].held_out:
            placed[i] = placed[i]._replace(held_out=False)
            held_out -= size
    if held_out >= least:
        return placed
    for i in reversed(range(len(placed))):  # whole pieces, as far as they fit
        size = len(placed[i].piece.text)
        if not placed[i].held_out and size <= due - held_out:
            placed[i] = placed[i]._replace(held_out=True)
            held_out += size
    return placed if held_out >= least else _more(placed, due - held_out, total // 2 - held_out)


def _more(placed: list[Placed], due: int, most: int) -> list[Placed]:
    """Hold out about `due` more characters where no piece is so short: the end of the last long one.

    A short document or a pair is not cut: of those that are not more than `most`, the one that comes closest
    to what is due is held out whole.
    """
    free = [i for i in reversed(range(len(placed))) if not placed[i].held_out]
    for i in free:
        piece, _, document = placed[i]
        size = len(piece.text)
        if piece.given or size <= due or (size <= SHORT and len(free) > 1):
            continue
        stop = cut(piece.text, size - due, due // 2)
        kept = Placed(Piece(piece.text[:stop], False, piece.origin), False, document)
        return [
            *placed[:i],
            kept,
            Placed(piece._replace(text=piece.text[stop:]), True, document),
            *placed[i + 1 :],
        ]
    fitting = [i for i in free if len(placed[i].piece.text) <= most]
    if fitting:
        best = min(fitting, key=lambda i: abs(len(placed[i].piece.text) - due))
        placed[best] = placed[best]._replace(held_out=True)
    return placed
