"""What a tokenizer does not keep of a text: counted, told and, if it is much, refused.

A text in the wrong alphabet, English read as DNA, would otherwise become one row of unknowns in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

MAX_UNKNOWN_FRACTION = 0.05
"""The share of unknown characters beyond which a text is taken for one of another alphabet. Genomes and
proteins have a few in ten thousand, and prose with emoji a few in a hundred."""

_MAX_TRACKED_CHARS, _MAX_SHOWN_CHARS = 64, 5
"""How many different unknown characters are remembered and told, the most frequent first."""

IUPAC_CODES = "RYSWKMBDHV"
"""Codes that stand for one of several bases: known, but not as a base."""


@dataclass(frozen=True)
class UnknownStats:
    """Of a text's `characters`, `unknown` have no token, `frequent` ones first; `ambiguous` are codes for
    several bases, which a tokenizer of bases reads as any base.

    `changed`: an example of what comes back otherwise though each character has a token, before and after.
    """

    num_chars: int = 0
    num_unknown: int = 0
    num_ambiguous: int = 0
    most_frequent: tuple[tuple[str, int], ...] = ()
    round_trip_difference: tuple[str, str] | None = None

    @classmethod
    def from_counts(cls, num_chars: int, counts: Mapping[str, int], ambiguous: str = "") -> UnknownStats:
        """From the counts of all characters without a token, of which some may be `ambiguous`."""
        some = sum(number for sign, number in counts.items() if sign in ambiguous)
        others = Counter({sign: number for sign, number in counts.items() if sign not in ambiguous})
        return cls(num_chars, others.total(), some, _most_frequent(others))

    def __add__(self, other: UnknownStats) -> UnknownStats:
        return UnknownStats(
            self.num_chars + other.num_chars,
            self.num_unknown + other.num_unknown,
            self.num_ambiguous + other.num_ambiguous,
            _most_frequent(Counter(dict(self.most_frequent)) + Counter(dict(other.most_frequent))),
            self.round_trip_difference or other.round_trip_difference,
        )

    @property
    def exceeds_limit(self) -> bool:
        """Whether so much is unknown that the text must be of another alphabet."""
        return self.num_unknown > MAX_UNKNOWN_FRACTION * self.num_chars

    def format_most_frequent(self) -> str:
        """The most frequent of them with their counts."""
        shown = ", ".join(f"{sign!r} {number:,}" for sign, number in self.most_frequent[:_MAX_SHOWN_CHARS])
        return f"{shown}, ..." if len(self.most_frequent) > _MAX_SHOWN_CHARS else shown

    def format_counts(self) -> str:
        """How many of how many."""
        of = f"{self.num_unknown:,} of {self.num_chars:,} characters"
        return (
            f"{of} {'is' if self.num_unknown == 1 else 'are'} unknown to the tokenizer ({self.format_most_frequent()})"
        )

    def describe(self, unk_token: str | None) -> list[str]:
        """What is to be told of a text that was taken; its unknown characters become that token."""
        told = []
        if self.num_unknown:
            verb = "becomes" if self.num_unknown == 1 else "become"
            told.append(f"{self.format_counts()} and {f'{verb} {unk_token}' if unk_token else 'left out'}")
        if self.num_ambiguous:
            told.append(
                f"{self.num_ambiguous:,} of {self.num_chars:,} characters are codes for several bases"
                f" ({', '.join(IUPAC_CODES)}) and become {unk_token}"
            )
        if self.round_trip_difference:
            before, after = self.round_trip_difference
            told.append(f"the tokenizer does not keep the text as it is: {before!r} comes back as {after!r}")
        return told


def _most_frequent(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """With ties in the order of characters, so that it does not depend on who counted first."""
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_TRACKED_CHARS])
