"""Texts with holes as a canvas of tokens: visible tokens are fixed, masked ones are to be generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.types import Tokens


@dataclass(frozen=True)
class Canvas:
    """Sequences to fill, and the seeds of their noise."""

    tokens: Tokens
    """int64 [B, L], with the mask id at the positions to fill."""
    seeds: tuple[int, ...]
    """One seed per sequence: its noise is a function of it alone."""
    masked: NDArray[np.bool_] | None = None
    """bool [B, L]: the masked positions, if they are known on the host. Samplers that fill a text in parts, whose
    tokens they have checked, give it, so that nothing must be read back for a part."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[1] < 1:
            raise ValueError(f"a canvas must be [B, L] with L >= 1; got shape {list(self.tokens.shape)}")
        if len(self.seeds) != len(self.tokens):
            raise ValueError(f"a canvas of {len(self.tokens)} rows needs as many seeds; got {len(self.seeds)}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds must be 0 or above; got {min(self.seeds)}")

    def host_mask(self, mask_id: int) -> NDArray[np.bool_]:
        """A copy of `masked`; if it is not known, it is read."""
        if self.masked is not None:
            return self.masked.copy()
        masked: NDArray[np.bool_] = (self.tokens == mask_id).cpu().numpy()
        return masked


def blank_canvas(n: int, length: int, mask_id: int, prompt: Sequence[int] = ()) -> Tokens:
    """`n` sequences of masks that start with the prompt."""
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
    """`length` masks after each prompt, and which positions [n, L] are text: the others are padding.

    Prompts end at the same position, so that all completions begin there; or, for models whose blocks begin with the
    text, in the same block.
    """
    if not prompts:
        raise ValueError("there is no prompt to complete")
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"length, the tokens to write after a prompt, must be at least 1; got {length!r}")
    sizes = [len(prompt) for prompt in prompts]
    if block_size is None:
        before = [max(sizes) - size for size in sizes]
    else:
        before = [(max(sizes) // block_size - size // block_size) * block_size for size in sizes]
    width = max(pad + size for pad, size in zip(before, sizes, strict=True)) + length
    tokens = torch.full((len(prompts), width), _pad_id(mask_id))
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, first) in enumerate(zip(prompts, before, strict=True)):
        begin, end = first + len(prompt), first + len(prompt) + length
        tokens[row, first:begin] = torch.tensor(prompt, dtype=torch.int64)
        tokens[row, begin:end] = mask_id
        valid[row, first:end] = True
    return tokens, valid


def infill_canvas(templates: Sequence[Sequence[int]], mask_id: int) -> tuple[Tokens, Tensor]:
    """Templates of different lengths [n, L], and which positions [n, L] are text: padding follows the shorter ones."""
    if not templates:
        raise ValueError("there is no template to fill")
    tokens = torch.full((len(templates), max(map(len, templates))), _pad_id(mask_id))
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in enumerate(templates):
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        valid[row, : len(ids)] = True
    return tokens, valid


def _pad_id(mask_id: int) -> int:
    """Any token but the mask, which would be filled."""
    return 0 if mask_id else 1
