"""Arithmetic of unmasking steps: which positions, how many, at what time, with which random numbers.

What a step does is planned on the host wherever it can be known there. Positions are passed as index tensors,
because a boolean mask must be read back from the device before anything can be indexed with it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64
from numpy.typing import NDArray
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking
from unmask.sampling.base import require_process

IntArray = NDArray[np.signedinteger[Any]]
_CountsT = TypeVar("_CountsT", Tensor, IntArray)


def tokens_per_step(num_masked: _CountsT, steps: int, step: Tensor | int) -> _CountsT:
    """How many of `num_masked` positions are unmasked at a step: equal shares, the first steps taking the rest."""
    share: _CountsT = num_masked // steps + (num_masked % steps > step)
    return share


def time_from_mask_ratio(
    denoiser: DenoiserLike, num_masked: Int[Tensor, " B #L"], num_initial: Int[Tensor, " B #L"]
) -> Float64[Tensor, " B #L"]:
    """The t at which `num_masked` of `num_initial` positions are expected to be masked: 1 - alpha(t) is their ratio."""
    schedule = require_process(denoiser, Masking).schedule
    return schedule.inverse(1 - num_masked.double() / num_initial)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def ranks(keys: Float[Tensor, "B L"]) -> Int64[Tensor, "B L"]:
    """[B, L]: the rank of each key in its row, the smallest first."""
    return keys.argsort(dim=1, stable=True).argsort(dim=1, stable=True)


def round_and_break_ties(score: Float[Tensor, " N"], tie_break: Float[Tensor, " N"]) -> Float64[Tensor, " N"]:
    """Scores [N] rounded to 14 bits, with equal ones ordered by the sequence's own noise [N].

    Scores are equal where nothing is visible yet, but for rounding errors, which depend on the batch.
    """
    mantissa, exponent = torch.frexp(score.double())
    rounded = torch.ldexp((mantissa * 2**14).round(), exponent - 14)
    return rounded * (1 + 1e-5 * tie_break)


def scatter_tokens(
    z: Int[Tensor, "B L"], sequence: Int[Tensor, " N"], position: Int[Tensor, " N"], tokens: Int[Tensor, " N"]
) -> Int[Tensor, "B L"]:
    """A new canvas with `tokens` [N] at these indices."""
    return z.index_put((sequence, position), tokens)
