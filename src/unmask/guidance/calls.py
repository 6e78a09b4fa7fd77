"""What denoisers around a denoiser must know of a call: its sequences, its places, the lines it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.context import Context
from unmask.types import LogX, Positions, Tokens


def query_indices(positions: Positions) -> tuple[Tensor, Tensor]:
    """Which sequence and which place of a call each line is of."""
    if isinstance(positions, Tensor):
        sequence, place = positions.nonzero(as_tuple=True)
        return sequence, place
    return positions


def resolve_sequence_ids(z: Tokens, sequence_ids: Tensor | None) -> Tensor:
    """The numbers [B] of a call's sequences in the canvas."""
    return torch.arange(len(z), device=z.device) if sequence_ids is None else sequence_ids


def cache_offset(context: Context) -> int | None:
    """Where in the text a call beside a cache begins; None where it must be the whole text."""
    return None if context.cache is None else context.cache.start


def validate_shape(z: Tokens, sequence_ids: Tensor, offset: int | None, shape: Sequence[int], what: str) -> None:
    """Refuse a call whose places or sequences are not those of `shape`, [L] or [B, L]."""
    length = shape[-1]
    if (offset is None and z.shape[1] != length) or (offset or 0) + z.shape[1] > length:
        raise ValueError(
            f"{what} are of texts of {length} tokens, and the sampler reads {z.shape[1]} of a text at a time:"
            " it must read all of it (a window as long as the text)"
        )
    if len(shape) == 2 and len(sequence_ids) and int(sequence_ids.max()) >= shape[0]:
        raise ValueError(f"{what} are of {shape[0]} sequences; there is none with number {int(sequence_ids.max())}")


def renormalize_like(reference: LogX, log_x: LogX) -> LogX:
    """The changed lines, each with the sum that it had."""
    return log_x - log_x.logsumexp(-1, keepdim=True) + reference.logsumexp(-1, keepdim=True)
