"""One schedule for each token of the vocabulary (GenMD4): some tokens are masked early, others late.

    P(token v is masked at t) = 1 - alpha_v(t) = (1 - eps) t^(w_v)        from t = t1 on,

and below t1 a straight line, (1 - eps) t1^(w_v) t/t1: all tokens are unmasked at the same rate there. (A power w < 1
would unmask many tokens at times near 0, where weights are near infinity.) With w = 1 for all tokens, this is
`LogLinear(eps)`. As with one schedule (`noise_level.py`), generation starts with masks only and ends with none.

A level of noise, the ends included, is two numbers: P(v is masked) = exp(log_scale + w_v log_t). So is a step between
two levels: P(a masked v stays masked) = exp of the differences of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor


class TokenNoiseLevel(NamedTuple):
    """A reverse step from time t, where P(v is masked) = exp(log_scale + w_v log_t), for each sequence: [B, 1]."""

    t: Float64[Tensor, "B 1"]
    """The time that the network is conditioned on."""
    log_scale: Float64[Tensor, "B 1"]
    """What all tokens have in common."""
    log_t: Float64[Tensor, "B 1"]
    """log t, and log t1 below t1."""
    weight: Float64[Tensor, "B 1"]
    """The factor of a masked token's loss; of an infinitesimal step, its rate where w = 1."""
    own_rates: Bool[Tensor, "B 1"]
    """Whether an infinitesimal step unmasks tokens at rates proportional to w, or all at the same rate."""
    log_stay: tuple[Float64[Tensor, "B 1"], Float64[Tensor, "B 1"]] | None
    """P(v stays masked in the step) = exp(log_stay[0] + w_v log_stay[1]); None for an infinitesimal step."""

    def log_mask_prob(self, power: Float[Tensor, "B L"]) -> Float64[Tensor, "B L"]:
        """log P(masked) of tokens with these powers."""
        return self.log_scale + power.double() * self.log_t


@dataclass(frozen=True, eq=False)
class TokenPowers:
    """alpha_v(t) = 1 - (1 - eps) t^(w_v) for each token v, and a straight line below t1."""

    power: Float[Tensor, " V"]
    """w of each token: a token with a large one is masked late, so it is revealed early. The mask's is not used."""
    eps: float = 1e-4
    """The fraction of tokens that is still visible at t = 1."""
    t1: float = 1e-3
    """The time below which all tokens are unmasked at one rate."""

    def __repr__(self) -> str:
        low, high = self.power.detach().aminmax()
        return f"alpha = 1 - {1 - self.eps:g} t^w, w of each token from {float(low):.3g} to {float(high):.3g}"

    def continuous_level(self, u: Float64[Tensor, "B 1"]) -> TokenNoiseLevel:
        """The level that u in [0, 1) stands for.

        A token is unmasked at the rate w_v/u, and 1/u below t1 and at t = 1, where alpha rises from 0 to eps.
        """
        t = (u / (1 - self.eps)).clamp(max=1)
        own_rates = (t >= self.t1) & (u < 1 - self.eps)
        numbers = self._numbers(t, u.clamp(min=1 - self.eps))
        return TokenNoiseLevel(t, *numbers, 1 / u.clamp(min=1e-12), own_rates, None)

    def published_level(self, u: Float64[Tensor, "B 1"]) -> TokenNoiseLevel:
        """The level at t = t1 + (1 - t1) u, without exact ends."""
        t = self.t1 + (1 - self.t1) * u
        numbers = self._numbers(t, torch.full_like(t, 1 - self.eps))
        return TokenNoiseLevel(t, *numbers, 1 / t, torch.ones_like(t, dtype=torch.bool), None)

    def discrete_level(self, u: Float64[Tensor, "B 1"], steps: int) -> TokenNoiseLevel:
        """One of T steps, from t = i/T to s = (i - 1)/T; all tokens are masked at t = 1 and none at 0."""
        i = (u * steps).long().clamp(max=steps - 1) + 1
        now, before = self._grid_numbers(i, steps), self._grid_numbers(i - 1, steps)
        log_stay = (before[0] - now[0], before[1] - now[1])
        everywhere = torch.ones_like(u, dtype=torch.bool)
        return TokenNoiseLevel(i.double() / steps, *now, torch.full_like(u, steps), everywhere, log_stay)

    def unmask_prob(self, i: int, steps: int) -> Float64[Tensor, " V"]:
        """P(z_s = v | z_t = mask, x = v) of each token v [V], in the step from t = i/T to s = (i - 1)/T."""
        u = torch.tensor([[(i - 0.5) / steps]], dtype=torch.float64, device=self.power.device)
        log_stay = self.discrete_level(u, steps).log_stay
        assert log_stay is not None
        return -torch.expm1(log_stay[0] + self.power.double() * log_stay[1])[0]

    def _numbers(
        self, t: Float64[Tensor, "B 1"], last: Float64[Tensor, "B 1"]
    ) -> tuple[Float64[Tensor, "B 1"], Float64[Tensor, "B 1"]]:
        """log_scale and log_t of time t, if P(v is masked) is `last` at t = 1."""
        late = t.clamp(min=self.t1)
        return last.log() + (t / late).log(), late.log()

    def _grid_numbers(
        self, i: Int64[Tensor, "B 1"], steps: int
    ) -> tuple[Float64[Tensor, "B 1"], Float64[Tensor, "B 1"]]:
        """log_scale and log_t of t = i/T."""
        t = i.double() / steps
        return self._numbers(t, torch.where(i == steps, 1, torch.full_like(t, 1 - self.eps)))
