"""Text with holes as a canvas of tokens: what is visible is fixed, what is masked is to be written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.types import Tokens

HOLE_PATTERN = re.compile(r"<mask(?::(\d+))?>")
_MAX_HOLE_TOKENS = 1_000_000

_TemplatePart: TypeAlias = str | int | list[int]
"""A part of a template: text, the length of a hole, or ids that are given."""
Template: TypeAlias = str | Sequence[_TemplatePart]
"""Text with `<mask:12>` for twelve hidden tokens (`<mask>` for one), or a list of its pieces."""


@dataclass(frozen=True)
class Canvas:
    """Sequences [B, L] with the mask id in their holes, and a seed for each: a row's own randomness."""

    tokens: Tokens
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[1] < 1:
            raise ValueError(f"a canvas must be [B, L] with L >= 1; got shape {list(self.tokens.shape)}")
        if len(self.seeds) != len(self.tokens):
            raise ValueError(f"a canvas of {len(self.tokens)} rows needs as many seeds; got {len(self.seeds)}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds must be 0 or above; got {min(self.seeds)}")


def parse_template(template: Template) -> list[_TemplatePart]:
    """A template as texts, ids and lengths of holes, at least one hole among them."""
    if isinstance(template, str):
        parts = HOLE_PATTERN.split(template)
        holes = [_hole_length(length) for length in parts[1::2]]
        pieces: list[_TemplatePart] = [parts[0]]
        for hole, text in zip(holes, parts[2::2], strict=True):
            pieces += [hole, text]
    else:
        pieces = list(template)
    lengths = [piece for piece in pieces if isinstance(piece, int)]
    if not lengths:
        raise ValueError(
            f"the template {_abbreviate(template)} has no hole; mark one as <mask:12> (12 tokens) or <mask>"
        )
    for length in lengths:
        if not 1 <= length <= _MAX_HOLE_TOKENS:
            raise ValueError(
                f"a hole must have 1 to {_MAX_HOLE_TOKENS:,} tokens; {_abbreviate(template)} has one of {length:,}"
            )
    if (hidden := sum(lengths)) > _MAX_HOLE_TOKENS:
        raise ValueError(f"holes have at most {_MAX_HOLE_TOKENS:,} tokens together; these have {hidden:,}")
    return pieces


def _hole_length(digits: str | None) -> int:
    """Of a hole; of a number that is too long to be read, one that is too large."""
    return 1 if digits is None else int(digits) if len(digits) <= 20 else 10**20


def encode_template(template: Template, encode: Callable[[str | list[int]], list[int]], mask_id: int) -> list[int]:
    """The ids of a template, its holes filled with the mask."""
    ids: list[int] = []
    for piece in parse_template(template):
        ids += [mask_id] * piece if isinstance(piece, int) else encode(piece)
    return ids


def blank_canvas(n: int, length: int, mask_id: int, prompt: Sequence[int] = ()) -> Tokens:
    """`rows` sequences of masks that start with the prompt."""
    for name, value in (("n", n), ("length", length)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be at least 1; got {value!r}")
    if len(prompt) >= length:
        raise ValueError(f"the prompt has {len(prompt)} tokens and leaves nothing to write in a length of {length}")
    tokens = torch.full((n, length), mask_id)
    tokens[:, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    return tokens


def prompt_canvas(
    prompts: Sequence[Sequence[int]], length: int, mask_id: int, block_size: int | None = None
) -> tuple[Tokens, Tensor]:
    """`length` masks after each prompt, and which places [n, L] are text: there is padding around the others.

    Prompts end at one place, so that what is written begins together; or, where text has blocks that begin
    with it, in blocks of one number.
    """
    if not prompts:
        raise ValueError("there is no prompt to go on from")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length, the tokens to write after a prompt, must be at least 1; got {length!r}")
    sizes = [len(prompt) for prompt in prompts]
    if block_size is None:
        before = [max(sizes) - size for size in sizes]
    else:
        before = [(max(sizes) // block_size - size // block_size) * block_size for size in sizes]
    width = max(pad + size for pad, size in zip(before, sizes, strict=True)) + length
    tokens = torch.full((len(prompts), width), 0 if mask_id else 1)  # anything but the mask: it is not written
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, first) in enumerate(zip(prompts, before, strict=True)):
        begin, end = first + len(prompt), first + len(prompt) + length
        tokens[row, first:begin] = torch.tensor(prompt, dtype=torch.int64)
        tokens[row, begin:end] = mask_id
        valid[row, first:end] = True
    return tokens, valid


def _abbreviate(template: Template) -> str:
    text = repr(template)
    return text if len(text) <= 60 else f"{text[:57]}..."
