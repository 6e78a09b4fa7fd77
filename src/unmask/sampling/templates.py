"""Templates: texts with holes, whose lengths are known or left open."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

HOLE_PATTERN = re.compile(r"<mask(?::(\d+|\d+\.\.\d+|\*))?>")
_MAX_HOLE_TOKENS = 1_000_000
ANY_LENGTH = range(33)
"""The lengths of `<mask:*>`."""

_TemplatePart: TypeAlias = str | int | range | list[int]
"""A piece of a template: text, the length of a hole or the range of its possible lengths, or fixed ids."""
Template: TypeAlias = str | Sequence[_TemplatePart]
"""Text with `<mask:12>` for twelve masked tokens (`<mask>` for one), `<mask:3..12>` for three to twelve or `<mask:*>`
for 0 to 32, of which the model chooses; or a list of pieces."""


def parse_template(template: Template) -> list[_TemplatePart]:
    """The pieces of a template: texts, ids and lengths of holes; ValueError unless there is a hole."""
    if isinstance(template, str):
        parts = HOLE_PATTERN.split(template)
        holes = [_hole_length(length) for length in parts[1::2]]
        pieces: list[_TemplatePart] = [parts[0]]
        for hole, text in zip(holes, parts[2::2], strict=True):
            pieces += [hole, text]
    else:
        pieces = list(template)
    lengths = [piece for piece in pieces if isinstance(piece, int | range)]
    if not lengths:
        raise ValueError(
            f"the template {_abbreviate(template)} has no hole; mark one as <mask:12> (12 tokens) or <mask>"
        )
    for length in lengths:
        _check_length(length, template)
    if (hidden := sum(map(_longest_length, lengths))) > _MAX_HOLE_TOKENS:
        raise ValueError(f"holes have at most {_MAX_HOLE_TOKENS:,} tokens together; these have {hidden:,}")
    return pieces


def _check_length(length: int | range, template: Template) -> None:
    if isinstance(length, range) and (len(length) == 0 or length.step != 1 or length[0] < 0):
        raise ValueError(
            f"the lengths of a hole are from the smaller to the larger, as in <mask:3..12>; {_abbreviate(template)} has"
            f" {length.start}..{length.stop - 1}"
        )
    if not 1 <= _longest_length(length) <= _MAX_HOLE_TOKENS:
        raise ValueError(
            f"a hole must have 1 to {_MAX_HOLE_TOKENS:,} tokens; {_abbreviate(template)} has one of"
            f" {_longest_length(length):,}"
        )


def _longest_length(length: int | range) -> int:
    """The tokens of a hole, at most."""
    return length if isinstance(length, int) else length[-1]


def _hole_length(written: str | None) -> int | range:
    """The length of a hole or its range; digits that are too many to parse give a length that is too large."""
    if written is None:
        return 1
    if written == "*":
        return ANY_LENGTH
    first, *last = (int(digits) if len(digits) <= 20 else 10**20 for digits in written.split(".."))
    return range(first, last[0] + 1) if last else first


@dataclass(frozen=True)
class MaskedText:
    """Ids with the mask in their holes."""

    ids: list[int]
    """Of the whole text."""
    holes: list[tuple[int, int]]
    """The first position and the length of each hole; neighbouring holes stay apart."""

    @property
    def num_masked(self) -> int:
        """Tokens to generate."""
        return sum(length for _, length in self.holes)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are given."""
        return len(self.ids) - self.num_masked


@dataclass(frozen=True)
class EncodedTemplate:
    """A template as ids, lengths of holes, and ranges of lengths of open holes."""

    pieces: tuple[list[int] | int | range, ...]

    @property
    def is_open(self) -> bool:
        """Whether the length of a hole is to be chosen."""
        return any(isinstance(piece, range) for piece in self.pieces)

    @property
    def num_given(self) -> int:
        """Tokens that are given."""
        return sum(len(piece) for piece in self.pieces if isinstance(piece, list))

    @property
    def longest(self) -> int:
        """The tokens of the text, at most."""
        return sum(len(piece) if isinstance(piece, list) else _longest_length(piece) for piece in self.pieces)

    def most_lengths(self) -> list[int]:
        """The most tokens of every hole, for models that choose how many they write; ValueError for a least number."""
        holes = [piece for piece in self.pieces if isinstance(piece, int | range)]
        if not all(isinstance(hole, range) and hole[0] == 0 for hole in holes):
            raise ValueError(
                "this model chooses how long a hole is: write <mask:*>, or <mask:0..12> for at most 12 tokens"
            )
        return [hole[-1] for hole in holes if isinstance(hole, range)]

    def close(self, mask_id: int, lengths: Sequence[int] = ()) -> MaskedText:
        """The text whose open holes have these lengths."""
        text, left = MaskedText([], []), iter(lengths)
        if len(lengths) != sum(isinstance(piece, range) for piece in self.pieces):
            raise ValueError("here the length of every hole must be known, as in <mask:12>")
        for piece in self.pieces:
            if isinstance(piece, list):
                text.ids.extend(piece)
                continue
            length = piece if isinstance(piece, int) else next(left)
            text.holes.append((len(text.ids), length))
            text.ids.extend([mask_id] * length)
        return text


def encode_template(template: Template, encode: Callable[[str | list[int]], list[int]]) -> EncodedTemplate:
    """A template whose texts and ids are encoded."""
    pieces = parse_template(template)
    return EncodedTemplate(tuple(piece if isinstance(piece, int | range) else encode(piece) for piece in pieces))


def _abbreviate(template: Template) -> str:
    text = repr(template)
    return text if len(text) <= 60 else f"{text[:57]}..."
