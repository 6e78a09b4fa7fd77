"""What a tokenizer does not keep of a text: counted, told and, if it is much, refused.

A text in the wrong alphabet, English read as DNA, would otherwise become one row of unknowns in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

MOST = 0.05
"""The share of unknown characters beyond which a text is taken for one of another alphabet. Genomes and
proteins have a few in ten thousand, and prose with emoji a few in a hundred."""

KEPT, SHOWN = 64, 5
"""How many different unknown characters are remembered and told, the most frequent first."""

IUPAC = "RYSWKMBDHV"
"""Codes that stand for one of several bases: known, but not as a base."""


@dataclass(frozen=True)
class Unknown:
    """Of a text's `characters`, `unknown` have no token, `frequent` ones first; `ambiguous` are codes for
    several bases, which a tokenizer of bases reads as any base.

    `changed`: an example of what comes back otherwise though each character has a token, before and after.
    """

    characters: int = 0
    unknown: int = 0
    ambiguous: int = 0
    frequent: tuple[tuple[str, int], ...] = ()
    changed: tuple[str, str] | None = None

    @classmethod
    def of(cls, characters: int, counts: Mapping[str, int], ambiguous: str = "") -> Unknown:
        """From the counts of all characters without a token, of which some may be `ambiguous`."""
        some = sum(number for sign, number in counts.items() if sign in ambiguous)
        others = Counter({sign: number for sign, number in counts.items() if sign not in ambiguous})
        return cls(characters, others.total(), some, _most_frequent(others))

    def __add__(self, other: Unknown) -> Unknown:
        return Unknown(
            self.characters + other.characters,
            self.unknown + other.unknown,
            self.ambiguous + other.ambiguous,
            _most_frequent(Counter(dict(self.frequent)) + Counter(dict(other.frequent))),
            self.changed or other.changed,
        )

    @property
    def is_much(self) -> bool:
        """Whether so much is unknown that the text must be of another alphabet."""
        return self.unknown > MOST * self.characters

    def listed(self) -> str:
        """The most frequent of them with their counts."""
        shown = ", ".join(f"{sign!r} {number:,}" for sign, number in self.frequent[:SHOWN])
        return f"{shown}, ..." if len(self.frequent) > SHOWN else shown

    def counted(self) -> str:
        """How many of how many."""
        of = f"{self.unknown:,} of {self.characters:,} characters"
        return f"{of} {'is' if self.unknown == 1 else 'are'} unknown to the tokenizer ({self.listed()})"

    def notes(self, becomes: str | None) -> list[str]:
        """What is to be told of a text that was taken; its unknown characters become that token."""
        told = []
        if self.unknown:
            verb = "becomes" if self.unknown == 1 else "become"
            told.append(f"{self.counted()} and {f'{verb} {becomes}' if becomes else 'left out'}")
        if self.ambiguous:
            told.append(
                f"{self.ambiguous:,} of {self.characters:,} characters are codes for several bases"
                f" ({', '.join(IUPAC)}) and become {becomes}"
            )
        if self.changed:
            before, after = self.changed
            told.append(f"the tokenizer does not keep the text as it is: {before!r} comes back as {after!r}")
        return told


def changed(before: str, after: str) -> tuple[str, str] | None:
    """Where a text and what came back of it first differ, white space aside; None if they do not."""
    one, two = "".join(before.split()), "".join(after.split())
    if one == two:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    start = max(0, place - 4)
    return one[start : start + 16], two[start : start + 16]


def _most_frequent(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """With ties in the order of characters, so that it does not depend on who counted first."""
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:KEPT])
