"""Gaussian diffusion of token embeddings with a learned schedule, as in Plaid (arXiv 2305.18619) and VDM.

A token x is a unit vector E_x, its noise z = alpha E_x + sigma eps with alpha^2 = sigmoid(-gamma),
sigma^2 = sigmoid(gamma) and gamma(t) = g0 + (g1 - g0) s(t), where s is a monotone network from 0 to 1. All of this
is in float64: the bound is a sum of large terms that nearly cancel in the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.diffusion.process import Process

_UNIT_SCALE = 0.01
"""Factor of each unit of the schedule's network."""
_EPS = 1e-8
"""Added to the norms of embeddings."""


@dataclass(frozen=True)
class GaussianDiffusion(Process):
    """Gaussian noise on the embeddings of all tokens; how much of it at time t is learned, and in the denoiser."""

    title = "Gaussian diffusion"
    default_sampler = "unmask.baselines._plaid:GaussianSteps"
    is_continuous = True

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        raise ValueError("the noise of Gaussian diffusion is learned: ask the denoiser's schedule")

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.alpha(t)


@dataclass(frozen=True)
class NoiseAt:
    """gamma and its rate at the times of a batch, float64 [B, 1]."""

    gamma: Float64[Tensor, "B 1"]
    rate: Float64[Tensor, "B 1"]
    """d gamma/dt."""

    @property
    def alpha(self) -> Float64[Tensor, "B 1"]:
        """The factor of the embedding."""
        return torch.sigmoid(-self.gamma).sqrt()

    @property
    def sigma(self) -> Float64[Tensor, "B 1"]:
        """The standard deviation of the noise."""
        return torch.sigmoid(self.gamma).sqrt()

    @property
    def weight(self) -> Float64[Tensor, "B 1"]:
        """-1/2 dSNR/dt = 1/2 exp(-gamma) gamma'."""
        return 0.5 * torch.exp(-self.gamma) * self.rate

    def detached_at(self, rows: Bool[Tensor, " B"]) -> NoiseAt:
        """The same, without gradients at some rows."""
        return NoiseAt(*(torch.where(rows[:, None], x.detach(), x) for x in (self.gamma, self.rate)))


class NoiseSchedule(nn.Module):
    """gamma(t): r(t) = sum over j of 0.01 softplus(w2_j) tanh(softplus(w1_j)(t - 1/2) + b_j), scaled to [g0, g1]."""

    def __init__(self, width: int, gamma_0: float, gamma_1: float) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(width, 1))
        self.w2 = nn.Parameter(torch.randn(1, width))
        self.b1 = nn.Parameter(torch.randn(width))
        self.gamma_0 = nn.Parameter(torch.full((), gamma_0))
        self.gamma_1 = nn.Parameter(torch.full((), gamma_1))

    def bounds(self) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
        """gamma(0) and gamma(1)."""
        return self.gamma_0.double(), self.gamma_1.double()

    def forward(
        self, t: Float[Tensor, "B 1"], rescale: Callable[[Tensor], Tensor] = lambda gradient: gradient
    ) -> NoiseAt:
        """gamma and its rate at t. `rescale` changes the gradients [B, 1] that reach the network s, not the bounds."""
        slope, scale = F.softplus(self.w1.double())[:, 0], _UNIT_SCALE * F.softplus(self.w2.double())[0]
        bias = self.b1.double()

        def units(time: Tensor) -> Tensor:
            return torch.tanh(slope * (time - 0.5) + bias)

        first, last = units(t.new_zeros(1, dtype=torch.float64)), units(t.new_ones(1, dtype=torch.float64))
        span = ((last - first) * scale).sum()
        at = units(t.double())
        share = ((at - first) * scale).sum(-1, keepdim=True) / span
        rate = ((1 - at.square()) * scale * slope).sum(-1, keepdim=True) / span
        for value in (share, rate):
            if value.requires_grad:
                value.register_hook(rescale)  # type: ignore[no-untyped-call]
        gamma_0, gamma_1 = self.bounds()
        return NoiseAt(gamma_0 + (gamma_1 - gamma_0) * share, (gamma_1 - gamma_0) * rate)


class UnitEmbedding(nn.Module):
    """Embeddings on the unit sphere: E_v = M_v/(|M_v| + 1e-8)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(vocab_size, width))

    def forward(self) -> Float[Tensor, "V e"]:
        """E."""
        embeddings: Tensor = self.matrix / (self.matrix.norm(dim=-1, keepdim=True) + _EPS)
        return embeddings


@dataclass(frozen=True)
class GaussianState:
    """What the network reads: noisy embeddings z [B, L, e], an earlier estimate of the clean ones (zero: none)."""

    z: Float[Tensor, "B L e"]
    estimate: Float[Tensor, "B L e"]
    noise: NoiseAt
    detached: Bool[Tensor, " B"] | None = None
    """Rows whose gradients do not reach the embeddings."""

    def __len__(self) -> int:
        return len(self.z)

    @property
    def shape(self) -> torch.Size:
        """[B, L], as that of a text."""
        return self.z.shape[:2]


class _MatmulByRow(torch.autograd.Function):
    """a [N, k] @ w [k, m], where only some rows contribute to the gradient of w."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(a, w, rows)
        return a @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        a, w, rows = ctx.saved_tensors
        return gradient @ w.T, (a * rows[:, None]).T @ gradient, None


def matmul_detached(
    a: Float[Tensor, "N k"], w: Float[Tensor, "k m"], detached: Bool[Tensor, " N"] | None
) -> Float[Tensor, "N m"]:
    """a @ w without gradients of w from the detached rows."""
    if detached is None or not torch.is_grad_enabled():
        return a @ w
    product: Tensor = _MatmulByRow.apply(a, w, ~detached)  # type: ignore[no-untyped-call]
    return product


def prior_nats(embeddings: Float64[Tensor, "B L e"], gamma_1: Float64[Tensor, "#B 1 1"]) -> Float64[Tensor, "B L"]:
    """KL(N(alpha_1 E_x, sigma_1^2) || N(0, 1)) of each token, summed over the e dimensions."""
    signal, variance = torch.sigmoid(-gamma_1), torch.sigmoid(gamma_1)
    return 0.5 * (signal * embeddings.square() + variance - 1 - F.logsigmoid(gamma_1)).sum(-1)


def token_embeddings(
    matrix: Float[Tensor, "V e"], tokens: Int[Tensor, "B L"], detached: Bool[Tensor, " B"] | None
) -> Float[Tensor, "B L e"]:
    """E_x of each token, without gradients of E from the detached rows."""
    embeddings = F.embedding(tokens, matrix)
    if detached is None:
        return embeddings
    return torch.where(detached[:, None, None], embeddings.detach(), embeddings)


def noiseless(embeddings: Float64[Tensor, "B L e"], noise: NoiseAt) -> Float64[Tensor, "B L e"]:
    """z at which the network reads sqrt(e) E_x at every time, as it does of a token without noise."""
    dim = embeddings.shape[-1]
    return embeddings * (noise.alpha.square() + dim * noise.sigma.square()).sqrt()[..., None]
