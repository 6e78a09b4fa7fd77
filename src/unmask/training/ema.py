"""The exponential moving average of the weights, which is what is evaluated and exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of the weights that are trained: w <- w + (1 - decay) (weights - w).

    The decay of update n is at most (1 + n)/(10 + n), so that the initial weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of the moving average must be in [0, 1); got {decay}")
        self.decay, self.num_updates = decay, 0
        self.weights = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average in the weights after a step."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        current: list[Tensor] = [p.detach() for p in trainable_parameters(model).values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)
        self.num_updates += 1

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, inside the `with` block."""
        pairs = [(p, self.weights[name]) for name, p in trainable_parameters(model).items()]
        self._swap(pairs)
        try:
            yield
        finally:
            self._swap(pairs)

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, average in pairs:
            previous = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(previous)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, each once, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
