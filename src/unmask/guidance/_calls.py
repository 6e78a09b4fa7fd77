"""Arguments of a denoiser call, resolved for wrappers: sequences, positions, queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.context import Context
from unmask.types import LogX, Positions, Tokens


def query_indices(positions: Positions) -> tuple[Tensor, Tensor]:
    """The sequence and the position of each query of a call."""
    if isinstance(positions, Tensor):
        sequence, position = positions.nonzero(as_tuple=True)
        return sequence, position
    return positions


def resolve_sequence_ids(z: Tokens, sequence_ids: Tensor | None) -> Tensor:
    """The indices [B] of a call's sequences in the canvas."""
    return torch.arange(len(z), device=z.device) if sequence_ids is None else sequence_ids


def cache_offset(context: Context) -> int | None:
    """The position at which a call with a cache begins; None without a cache, where a call is the whole text."""
    return None if context.cache is None else context.cache.start


def validate_shape(z: Tokens, sequence_ids: Tensor, offset: int | None, shape: Sequence[int], what: str) -> None:
    """ValueError if the positions or sequences of a call are outside `shape`, [L] or [B, L]."""
    length = shape[-1]
    if (offset is None and z.shape[1] != length) or (offset or 0) + z.shape[1] > length:
        raise ValueError(
            f"{what} are defined for texts of {length} tokens, but the sampler reads {z.shape[1]} at a time;"
            " use a window as long as the text"
        )
    if len(shape) == 2 and len(sequence_ids) and int(sequence_ids.max()) >= shape[0]:
        raise ValueError(f"{what} are defined for {shape[0]} sequences; got sequence id {int(sequence_ids.max())}")


def renormalize_like(reference: LogX, log_x: LogX) -> LogX:
    """log_x with the sum of each row as in `reference`."""
    return log_x - log_x.logsumexp(-1, keepdim=True) + reference.logsumexp(-1, keepdim=True)
