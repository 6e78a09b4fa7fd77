"""Which requests share a batch: sequences of about the same length, bounded by tokens.

The plan is a function of the requests alone. It does not depend on the number of ranks, on what an interrupted run has
done already, or on time, so every batch is computed with the same neighbours however the work is divided, and rounding
cannot make answers differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_PADDING = 1 / 8
"""The largest share of a batch's length by which a sequence may be shorter."""
_MIN_PADDING = 8
"""Tokens by which it may be shorter in any case."""


@dataclass(frozen=True)
class Item:
    """A sequence to compute: one of those that the request of a line asks for."""

    line: int
    """The number of the line."""
    index: int
    """Which of the line's sequences it is."""
    length: int
    """The tokens that the network reads."""
    work: int
    """The tokens that are generated or counted."""
    group: Any
    """Sequences of different groups, such as those of different samplers, share no batch; hashable."""
    content: Any
    """What the task needs to compute it."""


def plan_batches(items: Sequence[Item], max_tokens: int) -> list[list[int]]:
    """Batches of item numbers, the longest sequences first; of one length, those with the most work come first.

    A batch has at most `max_tokens` tokens with its padding, or one sequence.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.group, []).append(number)
    batches: list[list[int]] = []
    for numbers in groups.values():
        longest = 0
        for number in sorted(numbers, key=lambda number: (-items[number].length, -items[number].work, number)):
            length = items[number].length
            padding = longest - length
            is_full = not longest or (len(batches[-1]) + 1) * longest > max_tokens
            if is_full or padding > max(_MIN_PADDING, _MAX_PADDING * longest):
                batches.append([])
                longest = length
            batches[-1].append(number)
    return sorted(batches, key=lambda batch: -items[batch[0]].length * len(batch))
