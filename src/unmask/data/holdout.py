"""Which text is held out for validation: whole documents, and stretches of very long ones.

Which ones follows from their number in the corpus alone, so every machine that prepares a part of it agrees.
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
"""Characters at the end of the corpus that can still be moved to the validation split."""

LEAST = 1024
"""Characters that are held out even if the share asks for less."""


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

    If that gives less than half of what is due, the end of the corpus is held out too, so that any corpus
    of a few words, or of two pairs, has both splits. Not more than half of it is ever due.
    """
    held: deque[Placed] = deque()
    waiting = total = held_out = document = 0
    threshold = int(share * _TURN)
    for number, piece in enumerate(pieces, start=1):
        placed = Placed(piece, number * _GOLDEN % _TURN < threshold, document)
        document += piece.ends
        size = len(piece.text)
        total += size
        waiting += size
        held_out += size * placed.held_out
        held.append(placed)
        while len(held) > 2 and waiting - len(held[0].piece.text) >= HELD_BACK:
            waiting -= len(held[0].piece.text)
            yield held.popleft()
    due = min(max(int(share * total), LEAST), total // 2) if share else 0
    if 2 * held_out < due:
        yield from _hold_out_end(list(held), due - held_out, total // 2 - held_out)
    else:
        yield from held


def _hold_out_end(placed: list[Placed], due: int, most: int) -> list[Placed]:
    """Hold out `due` more characters from the end, in whole pieces if that is not too much.

    A pair is never cut; one that is more than the `most` that may be held out is passed over.
    """
    for i in reversed(range(len(placed))):
        if due <= 0:
            break
        piece, held_out, document = placed[i]
        size = len(piece.text)
        if held_out or (piece.given and size > most):
            continue
        if not piece.given and size > due and size > min(most, 2 * due):
            stop = cut(piece.text, size - due, due // 2)
            kept = Placed(Piece(piece.text[:stop], False, piece.origin), False, document)
            placed[i : i + 1] = [kept, Placed(piece._replace(text=piece.text[stop:]), True, document)]
            break
        placed[i] = Placed(piece, True, document)
        due -= size
        most -= size
    return placed
