"""Which times a batch is trained at: stratified uniform numbers, and distributions to draw times from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from unmask.types import Batch

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def stratified_uniform(batch: Batch, offset: float, num_blocks: int = 1) -> Float64[Tensor, "B num_blocks"]:
    """u_i = (s_i/N + offset) mod 1 for the batch's rows i of the N rows of the global batch: float64 [B, 1].

    The strata s are 0, ..., N - 1 in an order in which any consecutive rows cover all times, because ranks and
    micro-batches take consecutive rows. In order of time, half of the ranks would have the sequences with few
    masks and wait for the others.

    With `num_blocks`, one u for each block of a row, [B, num_blocks], shifted by the golden ratio from block to
    block, so that times also differ as much as possible within a row.

    Each u_i is uniform over [0, 1) if the offset is, and together they cover it evenly, on any number of ranks.
    (An offset below 1/N, as in published code, would tie a row to its stratum and bias its loss.)
    """
    rows = slice(batch.row_offset, batch.row_offset + len(batch.tokens))
    stratum = _van_der_corput_order(batch.resolved_global_batch_size)[rows].double()
    shift = torch.arange(num_blocks, dtype=torch.float64) * _GOLDEN_RATIO
    return (stratum[:, None] / batch.resolved_global_batch_size + shift + offset) % 1


def _van_der_corput_order(n: int) -> Int64[Tensor, " n"]:
    """0, ..., n - 1 in the order of the van der Corput sequence: by their binary digits read backwards."""
    digits, reversed_digits = torch.arange(n), torch.zeros(n, dtype=torch.long)
    for _ in range(n.bit_length()):
        reversed_digits = 2 * reversed_digits + digits % 2
        digits = digits // 2
    return reversed_digits.argsort().argsort()


@dataclass(frozen=True)
class UniformTimes:
    """Times are uniform over [0, 1]."""

    def importance_sample(self, u: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """A time for each uniform number u, and its importance weight 1/density."""
        return u, torch.ones_like(u)


@dataclass(frozen=True)
class ClippedTimes:
    """Times are uniform over [low, high], without an importance weight: for a curriculum.

    The loss is a bound only for [0, 1].
    """

    low: float = 0.0
    """The smallest time, from 0 (no masks)."""
    high: float = 1.0
    """The largest time, up to 1 (all masks)."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"clipped times need 0 <= low < high <= 1; got {self.low}, {self.high}")

    def importance_sample(self, u: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """low + (high - low) u, and 1."""
        return self.low + (self.high - self.low) * u, torch.ones_like(u)


@dataclass(frozen=True)
class PowerTimes:
    """u^power, of density t^(1/power - 1)/power."""

    power: float = 2.0
    """Above 1 there are more times near 0, below 1 more near 1."""

    def __post_init__(self) -> None:
        if not 0 < self.power < math.inf:
            raise ValueError(f"times need a power > 0; got {self.power}")

    def importance_sample(self, u: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """A time for each uniform number u, and its importance weight 1/density."""
        return u**self.power, self.power * u.clamp(min=1e-12) ** (self.power - 1)


@dataclass(frozen=True)
class HistogramTimes:
    """A histogram over n equal bins of [0, 1]."""

    weights: tuple[float, ...]
    """Bin i is drawn with probability weights[i] / sum(weights)."""

    def __post_init__(self) -> None:
        if not self.weights or not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"every bin of a histogram of times needs a weight > 0; got {self.weights}")

    def importance_sample(self, u: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """A time for each uniform number u, and its importance weight 1/density."""
        prob = torch.tensor(self.weights, dtype=u.dtype) / sum(self.weights)
        edges = torch.cat([torch.zeros(1, dtype=u.dtype), prob.cumsum(0)])
        bins = len(self.weights)
        index = (torch.searchsorted(edges, u, right=True) - 1).clamp(0, bins - 1)
        importance = 1 / (prob[index] * bins)
        return (index / bins + (u - edges[index]) * importance).clamp(max=1), importance


AnyTimes: TypeAlias = UniformTimes | ClippedTimes | PowerTimes | HistogramTimes
