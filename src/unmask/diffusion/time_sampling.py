"""Where in time a sequence is noised, and what its nats then weigh.

The clock has completed ends. A schedule may leave a little visible at t = 1 (alpha(1) = eps) or hide a
little at t = 0; the KL between q(z_1 | x) and an all-mask start would be infinite for any eps > 0, and
a figure that leaves it out is not a bound. Here, as in the samplers, text starts as nothing but masks
and ends with none, so the level of visible tokens runs from exactly 0 to exactly 1:

* in continuous time, levels below alpha(1) are passed with the clock at t = 1 (the prior term) and
  levels above alpha(0) with the clock at t = 0 (the reconstruction term);
* in T steps, the first step leaves level 0 and the last arrives at level 1.

For a schedule that ends at 0 and 1 both terms vanish and this is the textbook's bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Schedule
from unmask.types import Batch

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class NoiseLevel(NamedTuple):
    """A reverse step that is about to be taken, one for each sequence; float64 [B, 1] each."""

    t: Tensor
    """What the network is told."""
    alpha: Tensor
    """P(a token is visible) now: the noise that z is drawn with."""
    unmask_prob: Tensor | None
    """P(a masked token is revealed by the step); None for an infinitesimal one."""
    weight: Tensor
    """What a masked token's nats are multiplied with."""


def stratified_uniform(batch: Batch, offset: float, num_blocks: int = 1) -> Tensor:
    """u_i = (s_i/N + offset) mod 1 for the batch's rows i of the global batch's N: float64 [B, 1].

    The strata s are 0 ... N-1 in an order in which any rows in sequence cover all times: a rank or a
    micro-batch takes such rows. In order of time, half of the ranks would have the texts with few masks, and
    wait for those with many.

    With `parts`, the same for each of so many parts of a row, [B, parts]: turned by the golden ratio from
    part to part, so that times also differ as much as they can within a row.

    Each u_i is uniform over [0, 1) if the offset is (an offset below 1/N, as in published code, would tie a
    row to its stratum and bias its nats), and together they cover it evenly, on whatever rank they are.
    """
    mine = slice(batch.row_offset, batch.row_offset + len(batch.tokens))
    stratum = _van_der_corput_order(batch.resolved_global_batch_size)[mine].double()
    turn = torch.arange(num_blocks, dtype=torch.float64) * _GOLDEN_RATIO
    return (stratum[:, None] / batch.resolved_global_batch_size + turn + offset) % 1


def _van_der_corput_order(n: int) -> Tensor:
    """0 ... N-1 in the order of van der Corput's sequence: that of their numbers' digits, read backwards."""
    left, backwards = torch.arange(n), torch.zeros(n, dtype=torch.long)
    for _ in range(n.bit_length()):
        backwards = 2 * backwards + left % 2
        left = left // 2
    return backwards.argsort().argsort()


_MAX_STEPS = 1 << 20
"""More could not be told from infinitely many: the bound then differs by a millionth of a nat."""


def validate_steps(steps: int) -> None:
    """Refuse a number of steps that is none, or that only costs."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"steps must be a whole number; got {steps!r}, a {type(steps).__name__}")
    if not 1 <= steps <= _MAX_STEPS:
        raise ValueError(f"steps must be a whole number from 1 to {_MAX_STEPS:,}; got {steps:,}")


def alpha_grid(schedule: Schedule, steps: int) -> Tensor:
    """The visible share at t = 0, 1/T, ..., 1 with completed ends: float64 [T + 1], from 1 down to 0."""
    validate_steps(steps)
    level = schedule.alpha(torch.linspace(0, 1, steps + 1, dtype=torch.float64))
    level[0], level[-1] = 1, 0
    return level


def discrete_level(schedule: Schedule, steps: int, u: Tensor) -> NoiseLevel:
    """One of the T steps, uniformly: from t = i/T to s = (i - 1)/T, counted T times."""
    level = alpha_grid(schedule, steps)
    i = (u * steps).long().clamp(max=steps - 1) + 1
    alpha_t, alpha_s = level[i], level[i - 1]
    jump = Masking.unmask_prob(alpha_s, alpha_t)
    return NoiseLevel(t=i.double() / steps, alpha=alpha_t, unmask_prob=jump, weight=steps * jump)


def continuous_level(schedule: Schedule, u: Tensor) -> NoiseLevel:
    """A moment of continuous time: u in [0, 1] is split into reconstruction, diffusion and prior.

    Level 1 - u with weight 1/u where the clock stands still (see the module), t with weight(t) between.
    """
    start, end = schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    reconstruction, diffusion = 1 - start, start - end
    t = ((u - reconstruction) / diffusion).clamp(0, 1)
    moving = (u >= reconstruction) & (u < reconstruction + diffusion)
    return NoiseLevel(
        t=t,
        alpha=torch.where(moving, schedule.alpha(t), 1 - u),
        unmask_prob=None,
        weight=torch.where(moving, schedule.weight(t) / diffusion, 1 / u.clamp(min=1e-12)),
    )


def fixed_count_level(schedule: Schedule, u: Tensor, loss_mask: Tensor) -> NoiseLevel:
    """The moment at which exactly k of a row's n counted tokens are hidden, k uniform in 1, ..., n.

    If the network is not told the time, integrating the weight over all times at which k of n are hidden
    leaves 1/k, whatever the schedule: the bound is sum over k of (1/k) E[nats of k hidden tokens], so
    that a hidden token weighs n/k in a draw. Use with `evened` noise. The time is the one that u stands for.
    """
    n = loss_mask.sum(1, keepdim=True)
    k = ((u * n).long() + 1).minimum(n)
    level = 1 - k.double() / n.clamp(min=1)
    return NoiseLevel(t=schedule.inverse(1 - u), alpha=level, unmask_prob=None, weight=n / k.clamp(min=1))


def rank_uniform(uniform: Tensor, loss_mask: Tensor) -> Tensor:
    """Each counted token's place (0.5, 1.5, ...)/n in the order of the row's noise: k lie below k/n."""
    place = torch.where(loss_mask, uniform, torch.inf).argsort(1).argsort(1)
    return (place + 0.5) / loss_mask.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class UniformTimes:
    """u as it comes."""

    def importance_sample(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """u and its importance weight, 1."""
        return u, torch.ones_like(u)


@dataclass(frozen=True)
class ClippedTimes:
    """Only times from `low` to `high`, with no weight to make up for the others: for a curriculum, not for a
    bound (but for 0 and 1)."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"a part of the time needs 0 <= low < high <= 1; got {self.low}, {self.high}")

    def importance_sample(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """low + (high - low) u, and 1."""
        return self.low + (self.high - self.low) * u, torch.ones_like(u)


@dataclass(frozen=True)
class PowerTimes:
    """u^power: above 1, more draws near t = 0. The density is u^(1/power - 1)/power."""

    power: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.power < math.inf:
            raise ValueError(f"times need a power > 0; got {self.power}")

    def importance_sample(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The time and 1/density there."""
        return u**self.power, self.power * u.clamp(min=1e-12) ** (self.power - 1)


@dataclass(frozen=True)
class HistogramTimes:
    """A histogram: the i-th of n equal cells of [0, 1] is drawn with probability `shares[i]` / their sum."""

    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.weights or not all(0 < share < math.inf for share in self.weights):
            raise ValueError(f"every cell of a histogram of times needs a share > 0; got {self.weights}")

    def importance_sample(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The time and 1/density there."""
        share = torch.tensor(self.weights, dtype=u.dtype) / sum(self.weights)
        edges = torch.cat([torch.zeros(1, dtype=u.dtype), share.cumsum(0)])
        cells = len(self.weights)
        cell = (torch.searchsorted(edges, u, right=True) - 1).clamp(0, cells - 1)
        importance = 1 / (share[cell] * cells)
        return (cell / cells + (u - edges[cell]) * importance).clamp(max=1), importance


AnyTimes: TypeAlias = UniformTimes | ClippedTimes | PowerTimes | HistogramTimes
