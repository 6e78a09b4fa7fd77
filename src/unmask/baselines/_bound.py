"""The terms of Plaid's bound, and which of them each row of a batch pays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The random numbers of a batch: which term each row pays at which time, and with which noise."""

    t: Float64[Tensor, "B 1"]
    reconstruction_weight: Float64[Tensor, "B 1"]
    diffusion_weight: Float64[Tensor, "B 1"]
    self_conditioned: Bool[Tensor, " B"]
    eps: Float[Tensor, "B L e"]


@dataclass(frozen=True)
class Terms:
    """The terms of the bound in nats [B, L], zero where tokens do not count."""

    reconstruction: Float64[Tensor, "B L"]
    diffusion: Float64[Tensor, "B L"]
    prior: Float64[Tensor, "B L"]

    def nats(self, rows: Rows) -> Float64[Tensor, "B L"]:
        """Each row's own term, weighted so that the mean over rows is the bound."""
        return (
            torch.where(rows.reconstruction_weight > 0, rows.reconstruction_weight * self.reconstruction, 0)
            + torch.where(rows.diffusion_weight > 0, rows.diffusion_weight * self.diffusion, 0)
            + self.prior
        )

    def moments(self, rows: Rows, counted: Bool[Tensor, "B L"]) -> dict[str, Tensor]:
        """Sums whose means over tokens are the first two moments of a row's nats per token, for both terms."""
        lengths = counted.sum(-1, keepdim=True).clamp(min=1)
        sums: dict[str, Tensor] = {}
        for name, term, weight in (
            ("reconstruction", self.reconstruction, rows.reconstruction_weight),
            ("diffusion", self.diffusion, rows.diffusion_weight),
        ):
            per_token = term.detach().sum(-1, keepdim=True) / lengths
            sums[name] = (weight * per_token * lengths).sum()
            sums[f"{name}_squared"] = (weight * per_token.square() * lengths).sum()
        return sums
