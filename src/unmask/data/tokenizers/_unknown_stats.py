"""Characters that a tokenizer has no token for.

Text in the wrong alphabet, such as English encoded as DNA, would otherwise silently become unknown tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

MAX_UNKNOWN_FRACTION = 0.05
"""Text with a larger fraction of unknown characters is refused. Genomes and proteins have a few in ten
thousand, and prose with emoji a few in a hundred."""

_MAX_TRACKED_CHARS, _MAX_SHOWN_CHARS = 64, 5
"""How many different unknown characters are counted and shown, the most frequent first."""

IUPAC_CODES = "RYSWKMBDHV"
"""IUPAC codes of several bases, which become [UNK]."""


@dataclass(frozen=True)
class UnknownStats:
    """Counts of a text's characters: all, unknown ones (with the most frequent), and codes of several bases.

    `round_trip_difference`: an example of text that decodes differently though nothing in it is unknown, before
    and after.
    """

    num_chars: int = 0
    num_unknown: int = 0
    num_ambiguous: int = 0
    most_frequent: tuple[tuple[str, int], ...] = ()
    round_trip_difference: tuple[str, str] | None = None

    @classmethod
    def from_counts(cls, num_chars: int, counts: Mapping[str, int], ambiguous: str = "") -> UnknownStats:
        """From the counts of all characters without a token, some of which may be `ambiguous`."""
        num_ambiguous = sum(number for sign, number in counts.items() if sign in ambiguous)
        others = Counter({sign: number for sign, number in counts.items() if sign not in ambiguous})
        return cls(num_chars, others.total(), num_ambiguous, _most_frequent(others))

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
        """Whether so much is unknown that the text must have another alphabet."""
        return self.num_unknown > MAX_UNKNOWN_FRACTION * self.num_chars

    def format_most_frequent(self) -> str:
        """The most frequent unknown characters with their counts."""
        shown = ", ".join(f"{sign!r} {number:,}" for sign, number in self.most_frequent[:_MAX_SHOWN_CHARS])
        return f"{shown}, ..." if len(self.most_frequent) > _MAX_SHOWN_CHARS else shown

    def format_counts(self) -> str:
        """How many characters of how many are unknown."""
        of = f"{self.num_unknown:,} of {self.num_chars:,} characters"
        return (
            f"{of} {'is' if self.num_unknown == 1 else 'are'} unknown to the tokenizer ({self.format_most_frequent()})"
        )

    def describe(self, unk_token: str | None) -> list[str]:
        """Sentences about an accepted text, whose unknown characters become `unk_token`."""
        lines = []
        if self.num_unknown:
            verb = "becomes" if self.num_unknown == 1 else "become"
            lines.append(f"{self.format_counts()} and {f'{verb} {unk_token}' if unk_token else 'left out'}")
        if self.num_ambiguous:
            lines.append(
                f"{self.num_ambiguous:,} of {self.num_chars:,} characters are codes for several bases"
                f" ({', '.join(IUPAC_CODES)}) and become {unk_token}"
            )
        if self.round_trip_difference:
            before, after = self.round_trip_difference
            lines.append(f"the tokenizer does not keep the text as it is: {before!r} comes back as {after!r}")
        return lines


def _most_frequent(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Ties in the order of characters, so that the result does not depend on the order of counting."""
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_TRACKED_CHARS])
