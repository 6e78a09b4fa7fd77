"""What denoisers around a denoiser must know of a call: its sequences, its places, the lines it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.masks import Beside
from unmask.types import LogX, Rows, Tokens


def asked(rows: Rows) -> tuple[Tensor, Tensor]:
    """Which sequence and which place of a call each line is of."""
    if isinstance(rows, Tensor):
        sequence, place = rows.nonzero(as_tuple=True)
        return sequence, place
    return rows


def numbers(z: Tokens, which: Tensor | None) -> Tensor:
    """The numbers [B] of a call's sequences in the canvas."""
    return torch.arange(len(z), device=z.device) if which is None else which


def first_place(context: Mapping[str, Any]) -> int | None:
    """Where in the text a call beside a cache begins; None where it must be the whole text."""
    beside: Beside | None = context.get("beside")
    return None if beside is None else beside.start


def fits(z: Tokens, which: Tensor, start: int | None, shape: Sequence[int], what: str) -> None:
    """Refuse a call whose places or sequences are not those of `shape`, [L] or [B, L]."""
    length = shape[-1]
    if (start is None and z.shape[1] != length) or (start or 0) + z.shape[1] > length:
        raise ValueError(
            f"{what} are of texts of {length} tokens, and the sampler reads {z.shape[1]} of a text at a time:"
            " it must read all of it (a window as long as the text)"
        )
    if len(shape) == 2 and len(which) and int(which.max()) >= shape[0]:
        raise ValueError(f"{what} are of {shape[0]} sequences; there is none with number {int(which.max())}")


def with_mass_of(before: LogX, changed: LogX) -> LogX:
    """The changed lines, each with the sum that it had."""
    return changed - changed.logsumexp(-1, keepdim=True) + before.logsumexp(-1, keepdim=True)
