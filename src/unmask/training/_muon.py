"""Muon: momentum with orthogonalized matrix updates, so that every direction moves alike.

torch.optim.Muon does the same, but always orthogonalises in bfloat16, which CPUs without bfloat16
instructions do some fifty times more slowly than float32. Here the precision is the parameter's own on a
CPU, unless autocast asks for less, and bfloat16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of a s + b s^3 + c s^5, which brings singular values s in (0, 1] near 1 in five rounds."""


class MuonOptimizer(Optimizer):
    """For matrices only. With G the gradient: M <- m M + (1 - m) G, N = (1 - m) G + m M (Nesterov), and
    W <- W - 0.2 sqrt(max(rows, columns)) lr orthogonal(N): steps of the size that AdamW would take."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon is for matrices; got a parameter of shape {list(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = _orthogonalize(parameter.grad.lerp(buffer, momentum))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-0.2 * lr * max(parameter.shape) ** 0.5)


def _orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """The nearest matrix whose singular values are all about 1 (0.7 to 1.2), by Newton-Schulz iteration."""
    low = matrix.is_cuda or torch.is_autocast_enabled(matrix.device.type)
    x = matrix.bfloat16() if low else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=1e-7)
    whole = not hasattr(x, "full_tensor")  # a sharded matrix cannot be written to along its diagonal
    long = whole and x.shape[1] >= 2 * x.shape[0] and x.dtype != torch.bfloat16
    x = _newton_schulz_gram(x @ x.mT, num_iterations) @ x if long else _newton_schulz(x, num_iterations)
    return x.mT if tall else x


def _newton_schulz(x: Tensor, num_iterations: int) -> Tensor:
    """x <- (a + b G + c G^2) x, with G = x x^T."""
    a, b, c = _NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x


def _newton_schulz_gram(gram: Tensor, num_iterations: int) -> Tensor:
    """What `_newton_schulz` multiplies x with, from x x^T alone: for long matrices half the work.

    A round multiplies x with P = a + b G + c G^2, and so G with P on both sides.
    """
    a, b, c = _NEWTON_SCHULZ_COEFFICIENTS
    factor: Tensor | None = None
    for number in range(num_iterations):
        p = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal().add_(a)
        factor = p if factor is None else p @ factor
        if number < num_iterations - 1:
            gram = p @ gram @ p
    assert factor is not None
    return factor
