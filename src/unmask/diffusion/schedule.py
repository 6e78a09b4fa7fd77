"""Noise schedules: alpha(t), the probability that a token is still visible at time t.

Every schedule gives `alpha(t)`, its derivative `dalpha(t)` and `weight(t) = -alpha'/(1 - alpha)`, the
weight of a masked token's loss. Each is written in a form without cancellation, so float32 is accurate at
both ends; at t = 0, where the weight diverges and nothing is masked, t is clamped to a tiny positive number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor


def _clamp_off_zero(t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """t, but never so small that 1/t overflows."""
    return t.clamp(min=torch.finfo(t.dtype).tiny ** 0.5)


def _validate_eps(eps: float) -> None:
    if not 0 <= eps < 1:
        raise ValueError(f"eps, the fraction of tokens that are unmasked at t = 1, must be in [0, 1); got {eps}")


class Schedule(ABC):
    """alpha falls from about 1 at t = 0 to about 0 at t = 1."""

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """P(a token is visible at t)."""

    @abstractmethod
    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The derivative of alpha, at most 0."""

    @abstractmethod
    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """-alpha'(t) / (1 - alpha(t))."""

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """-log alpha(t), the total noise that networks with published weights are conditioned on."""
        return -self.alpha(t).clamp(min=torch.finfo(t.dtype).tiny).log()

    def inverse(self, alpha: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        """The t at which `alpha` is reached, clamped to [0, 1]: bisection, exact to float64's last bits."""
        alpha = alpha.double()
        low, high = torch.zeros_like(alpha), torch.ones_like(alpha)
        for _ in range(60):
            middle = (low + high) / 2
            above = self.alpha(middle) > alpha
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return high


@dataclass(frozen=True)
class LogLinear(Schedule):
    """alpha = 1 - (1 - eps) t, so that -log(alpha) is log-linear. eps = 0 is LLaDA's linear schedule."""

    eps: float = 1e-3
    """The fraction of tokens that is still visible at t = 1."""

    def __post_init__(self) -> None:
        _validate_eps(self.eps)

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 - (1 - self.eps) * t

    def inverse(self, alpha: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        return ((1 - alpha.double()) / (1 - self.eps)).clamp(0, 1)

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.full_like(t, self.eps - 1)

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 / _clamp_off_zero(t)


@dataclass(frozen=True)
class Cosine(Schedule):
    """alpha = eps + (1 - eps) cos(pi t / 2); 1 - alpha = (1 - eps) 2 sin^2(pi t / 4)."""

    eps: float = 1e-3
    """The fraction of tokens that is still visible at t = 1."""

    def __post_init__(self) -> None:
        _validate_eps(self.eps)

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.eps + (1 - self.eps) * torch.cos(t * (math.pi / 2)).clamp(min=0)

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -(1 - self.eps) * (math.pi / 2) * torch.sin(t * (math.pi / 2))

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (math.pi / 2) / torch.tan(_clamp_off_zero(t) * (math.pi / 4))


@dataclass(frozen=True)
class CosineSquared(Schedule):
    """alpha = eps + (1 - eps) cos^2(pi t / 2); 1 - alpha = (1 - eps) sin^2(pi t / 2)."""

    eps: float = 1e-3
    """The fraction of tokens that is still visible at t = 1."""

    def __post_init__(self) -> None:
        _validate_eps(self.eps)

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.eps + (1 - self.eps) * torch.cos(t * (math.pi / 2)).square()

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -(1 - self.eps) * (math.pi / 2) * torch.sin(t * math.pi).clamp(min=0)

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        # The tangent of pi/2 is finite and, in float32, negative.
        return (math.pi / torch.tan(_clamp_off_zero(t) * (math.pi / 2))).clamp(min=0)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """alpha = 1 - t^power."""

    power: float = 2.0
    """Above 1 masking starts slowly, below 1 fast."""

    def __post_init__(self) -> None:
        if not self.power > 0:
            raise ValueError(f"a polynomial schedule needs power > 0; got {self.power}")

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return 1 - t**self.power

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -self.power * _clamp_off_zero(t) ** (self.power - 1)

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.power / _clamp_off_zero(t)


@dataclass(frozen=True)
class Hyperbolic(Schedule):
    """alpha = (1 - t) / (1 + k t), k = e^speed - 1: most tokens are masked at once, a fast start.

    One write-up of MDLM prints this formula (speed = 10) and calls it log-linear; it is not.
    """

    speed: float = 10.0
    """log(1 + k): the larger, the more tokens are masked early."""

    def __post_init__(self) -> None:
        if not 0 < self.speed <= 40:
            raise ValueError(f"a hyperbolic schedule needs a speed above 0 and up to 40; got {self.speed}")

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return (1 - t) / (1 + math.expm1(self.speed) * t)

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -math.exp(self.speed) / (1 + math.expm1(self.speed) * t).square()

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        t = _clamp_off_zero(t)
        return 1 / (t * (1 + math.expm1(self.speed) * t))


class RateSchedule(Schedule):
    """alpha = exp(-sigma), where sigma is the integral of the masking rate."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]: ...

    @abstractmethod
    def rate(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The derivative of sigma."""

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.exp(-self.sigma(t))

    def dalpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -self.rate(t) * self.alpha(t)

    def weight(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        t = _clamp_off_zero(t)
        return self.rate(t) / torch.expm1(self.sigma(t)).clamp(min=torch.finfo(t.dtype).tiny)


@dataclass(frozen=True)
class Geometric(RateSchedule):
    """-log alpha = sigma_min^(1-t) sigma_max^t."""

    sigma_min: float = 1e-4
    """-log alpha at t = 0."""
    sigma_max: float = 20.0
    """-log alpha at t = 1."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(f"{self} needs 0 < sigma_min < sigma_max")

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.sigma_min ** (1 - t) * self.sigma_max**t

    def rate(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.sigma(t) * math.log(self.sigma_max / self.sigma_min)


@dataclass(frozen=True)
class LinearSigma(RateSchedule):
    """-log alpha = sigma_min + (sigma_max - sigma_min) t."""

    sigma_min: float = 1e-4
    """-log alpha at t = 0."""
    sigma_max: float = 20.0
    """-log alpha at t = 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(f"{self} needs 0 <= sigma_min < sigma_max")

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.sigma_min + self.rate(t) * t

    def rate(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.full_like(t, self.sigma_max - self.sigma_min)


@dataclass(frozen=True)
class IntegratedRate(RateSchedule):
    """alpha = exp(-integral of beta from 0 to t), for any masking rate `beta(t) >= 0` written in torch.

    Gauss-Legendre quadrature on cells that shrink towards both ends, so a rate that diverges at t = 1
    (beta = 1/(1 - t) gives alpha = 1 - t) is integrated too.
    """

    beta: Callable[[Tensor], Tensor]
    """The masking rate, a function of t in [0, 1]."""
    num_cells: int = 256
    """Cells of the quadrature."""

    def __post_init__(self) -> None:
        rate = self.rate(torch.linspace(0, 1, 1001, dtype=torch.float64))
        bad = rate[~(rate.isfinite() & (rate >= 0))]
        if len(bad):
            raise ValueError(f"the rate beta(t) must be finite and at least 0 on (0, 1); got {float(bad[0])}")

    def rate(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        # At the ends themselves a rate may be infinite; float32 needs a larger step away from 1.
        margin = max(1e-7, torch.finfo(t.dtype).eps)
        return self.beta(t.clamp(min=margin, max=1 - margin))

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        edges, total = (table.to(t.device) for table in self._table)
        fine = t.double()
        cell = (torch.searchsorted(edges, fine.detach(), right=True) - 1).clamp(0, self.num_cells - 1)
        return (total[cell] + self._integral(edges[cell], fine)).to(t.dtype)

    def _integral(self, low: Float64[Tensor, "*shape"], high: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
        half = (high - low) / 2
        nodes, weights = (torch.as_tensor(a, device=low.device) for a in np.polynomial.legendre.leggauss(16))
        at = low[..., None] + half[..., None] * (1 + nodes)
        at = at.clamp(min=torch.finfo(at.dtype).tiny)  # a cell without width may lie where beta is infinite
        return (self.beta(at) * weights).sum(-1) * half

    @cached_property
    def _table(self) -> tuple[Float64[Tensor, " edges"], Float64[Tensor, " edges"]]:
        """The cells' edges and the integral up to each."""
        edges = (1 - torch.cos(torch.linspace(0, math.pi, self.num_cells + 1, dtype=torch.float64))) / 2
        steps = self._integral(edges[:-1], edges[1:])
        return edges, torch.cat([torch.zeros(1, dtype=torch.float64), steps.cumsum(0)])
