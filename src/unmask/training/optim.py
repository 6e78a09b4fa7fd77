"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from unmask.backbones.base import network_blocks, undecayed_parameters
from unmask.training._muon import MuonOptimizer
from unmask.training.ema import trainable_parameters


def _validate_lr(lr: float) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"a learning rate must be above 0; got {lr}")


@dataclass(frozen=True)
class AdamW:
    """AdamW, with weight decay on matrices only: not on vectors (norms, biases), nor where a network rules it out."""

    lr: float = 3e-4
    """The peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays of the averages of the gradient and of its square."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    eps: float = 1e-8
    """Added to the root of the averaged squared gradient."""

    def __post_init__(self) -> None:
        _validate_lr(self.lr)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """One optimizer for all parameters that are trained."""
        parameters = trainable_parameters(model).values()
        return [self.build_for(parameters, _lr_scales(model), undecayed_parameters(model))]

    def build_for(
        self,
        parameters: Iterable[nn.Parameter],
        lr_scales: Mapping[nn.Parameter, float] | None = None,
        undecayed: Set[nn.Parameter] = frozenset(),
    ) -> Optimizer:
        """An optimizer for these parameters, some of them with `lr_scales` times the learning rate."""
        by_group: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            scale, decayed = (lr_scales or {}).get(parameter, 1.0), parameter.ndim >= 2 and parameter not in undecayed
            by_group.setdefault((scale, decayed), []).append(parameter)
        groups = [
            {"params": group, "weight_decay": self.weight_decay if decayed else 0.0, "base_lr": self.lr * scale}
            for (scale, decayed), group in sorted(by_group.items(), key=lambda item: (item[0][0], not item[0][1]))
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class Muon:
    """Muon on the matrices of the blocks, AdamW on the rest (embedding, head, norms, biases)."""

    lr: float = 1.5e-3
    """The peak learning rate of the matrices of the blocks."""
    momentum: float = 0.95
    """Decay of the averaged gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices of the blocks."""
    adamw: AdamW = AdamW(lr=1e-3)
    """The optimizer of all other parameters."""

    def __post_init__(self) -> None:
        _validate_lr(self.lr)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """Two optimizers, which step together."""
        in_blocks = {parameter for block in network_blocks(model) for parameter in block.parameters()}
        undecayed = undecayed_parameters(model)
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in trainable_parameters(model).values():
            is_matrix = parameter in in_blocks and parameter.ndim == 2 and parameter not in undecayed
            (matrices if is_matrix else rest).append(parameter)
        others = [self.adamw.build_for(rest, _lr_scales(model), undecayed)] if rest else []
        if not matrices:
            return others
        groups = [{"params": matrices, "base_lr": self.lr}]
        muon = MuonOptimizer(groups, self.lr, self.momentum, self.weight_decay)
        return [muon, *others]


def _lr_scales(model: nn.Module) -> dict[nn.Parameter, float]:
    """The parameters to which a model gives learning rates of their own (`Denoiser.lr_scales`)."""
    ask: Callable[[], dict[str, float]] = getattr(model, "lr_scales", dict)
    scales = ask()
    return {parameter: scales[name] for name, parameter in model.named_parameters() if name in scales}


AnyOptimizer: TypeAlias = AdamW | Muon


@dataclass(frozen=True)
class ConstantLR:
    """The peak learning rate to the end."""

    def factor(self, progress: float) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class CosineDecay:
    """From the peak down to `min_factor` of it along half a cosine."""

    min_factor: float = 0.0
    """The last learning rate as a share of the peak."""

    def factor(self, progress: float) -> float:
        """min + (1 - min) (1 + cos(pi progress))/2."""
        return self.min_factor + (1 - self.min_factor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class LinearDecay:
    """From the peak down to `min_factor` of it in a straight line."""

    min_factor: float = 0.0
    """The last learning rate as a share of the peak."""

    def factor(self, progress: float) -> float:
        """1 - (1 - min) progress."""
        return 1 - (1 - self.min_factor) * progress


AnyLRSchedule: TypeAlias = ConstantLR | CosineDecay | LinearDecay


@dataclass(frozen=True)
class LRScheduler:
    """Sets the learning rate of every step: linear warmup, then the schedule over the remaining steps."""

    optimizers: Sequence[Optimizer]
    schedule: AnyLRSchedule
    warmup_steps: int
    steps: int

    def factor(self, step: int) -> float:
        """What every peak learning rate is multiplied with at `step` = 0, 1, ..., steps - 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.schedule.factor((step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))

    def set(self, step: int) -> float:
        """Set the learning rates of `step`; their factor."""
        factor = self.factor(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        return factor
