"""Optimizers, learning-rate schedules and the moving average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unmask.training.muon import MuonOptimizer


def _validate_lr(lr: float) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"a learning rate must be above 0; got {lr}")


@dataclass(frozen=True)
class AdamW:
    """Weight decay on matrices only: norms, biases and single rows are left alone."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _validate_lr(self.lr)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """One optimizer for all parameters that are trained."""
        return [self.build_for(_trainable_parameters(model).values())]

    def build_for(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """An optimizer for these parameters."""
        decayed: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for parameter in parameters:
            (decayed if parameter.ndim >= 2 else free).append(parameter)
        groups = [
            {"params": group, "weight_decay": decay, "base_lr": self.lr}
            for group, decay in ((decayed, self.weight_decay), (free, 0.0))
            if group
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class Muon:
    """Muon on the matrices of the blocks, AdamW on the rest (embedding, head, norms, biases)."""

    lr: float = 1.5e-3
    momentum: float = 0.95
    weight_decay: float = 0.0
    adamw: AdamW = AdamW(lr=1e-3)

    def __post_init__(self) -> None:
        _validate_lr(self.lr)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """Two optimizers, which step together."""
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in _trainable_parameters(model).items():
            (matrices if ".blocks." in f".{name}" and parameter.ndim == 2 else rest).append(parameter)
        others = [self.adamw.build_for(rest)] if rest else []
        if not matrices:
            return others
        groups = [{"params": matrices, "base_lr": self.lr}]
        muon = MuonOptimizer(groups, self.lr, self.momentum, self.weight_decay)
        return [muon, *others]


AnyOptimizer: TypeAlias = AdamW | Muon


@dataclass(frozen=True)
class ConstantLR:
    """Stay at the peak."""

    def factor(self, progress: float) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class CosineDecay:
    """From the peak to `floor` of it along half a cosine."""

    min_factor: float = 0.0

    def factor(self, progress: float) -> float:
        """floor + (1 - floor) (1 + cos(pi progress))/2."""
        return self.min_factor + (1 - self.min_factor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class LinearDecay:
    """From the peak to `floor` of it in a straight line."""

    min_factor: float = 0.0

    def factor(self, progress: float) -> float:
        """1 - (1 - floor) progress."""
        return 1 - (1 - self.min_factor) * progress


AnyLRSchedule: TypeAlias = ConstantLR | CosineDecay | LinearDecay


def lr_factor(step: int, steps: int, warmup_steps: int, schedule: AnyLRSchedule) -> float:
    """What every base learning rate is multiplied with at `step` = 0, 1, ..., steps - 1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return schedule.factor((step - warmup_steps) / max(1, steps - warmup_steps))


def set_lr(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Scale all groups from their base."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor


def scale_and_clip_grads(parameters: Iterable[nn.Parameter], scale: float, max_norm: float) -> float:
    """Multiply all gradients by `scale`, and once more if their norm is then above `clip`; that norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    full = getattr(norm, "full_tensor", None)  # a sharded model's norm is a distributed tensor
    before = scale * float(full() if full is not None else norm)
    if math.isfinite(before):
        torch._foreach_mul_(gradients, scale * min(1.0, max_norm / (before + 1e-6)))
    return before


class EMA:
    """Exponential moving average of the weights that are trained: w <- w + (1 - decay) (weights - w).

    Early on, when there is little to average, the decay is (1 + n)/(10 + n) if that is less.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of the moving average must be in [0, 1); got {decay}")
        self.decay, self.num_updates = decay, 0
        self.weights = {name: p.detach().clone() for name, p in _trainable_parameters(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        current: list[Tensor] = [p.detach() for p in _trainable_parameters(model).values()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1 - decay)
        self.num_updates += 1

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for a while."""
        pairs = [(p, self.weights[name]) for name, p in _trainable_parameters(model).items()]
        self._swap(pairs)
        try:
            yield
        finally:
            self._swap(pairs)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """The averaged weights, for good."""
        for name, parameter in _trainable_parameters(model).items():
            parameter.copy_(self.weights[name])

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, average in pairs:
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)


def _trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, each once, in the order of their names' definition."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
