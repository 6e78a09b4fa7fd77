"""LoRA fine-tuning: the network is frozen, and products of thin matrices are trained in its place.

A weight is read as W + (alpha/rank) B A wherever the network reads it, whole or in slices as attention does.
B starts at zero, so the first prediction is the frozen network's own. Where W has 16 bits or less, such a sum would
lose small differences: the layer's output is then W x + (alpha/rank) B A x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from unmask.backbones.base import network_blocks
from unmask.ops.linear import Linear, QuantizedLinear, Weight

_DTYPES = ("float32", "bfloat16", "int8", "int4")

_FrozenLinear: TypeAlias = nn.Linear | QuantizedLinear


@dataclass(frozen=True)
class LoRA:
    """LoRA adapters for the linear layers of the blocks: W + (alpha/rank) B A with W frozen."""

    rank: int = 8
    """The rank of B A."""
    alpha: float = 16.0
    """The scale of the adapters; their factor is alpha/rank."""
    target_modules: tuple[str, ...] = ()
    """Layers by their path inside a block, or its beginning: "attention" is all of its layers, "attention.qkv" one.
    Empty: all layers but those of the time conditioning, those that choose experts, and those that are thinner than the
    rank."""
    seed: int = 0
    """Decides the initial values of A; B starts at zero."""
    dtype: str = "float32"
    """The type in which the frozen weights are kept: float32, bfloat16, int8 or int4."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1; got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0; got {self.alpha}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"the dtype of frozen weights must be one of {', '.join(_DTYPES)}; got {self.dtype!r}")

    def apply(self, denoiser: nn.Module) -> None:
        """Freeze the network, in place, and add trainable matrices A and B to the chosen layers.

        Call it before optimizers, moving averages and parallel wrappers are built.
        """
        if self.is_applied(denoiser):
            raise ValueError("this network has LoRA adapters already: call merge_lora() first")
        chosen = self._target_layers(denoiser)
        for name, layer in chosen:
            if self.rank > min(layer.weight.shape):
                raise ValueError(
                    f"rank {self.rank} is more than {name} can have, {min(layer.weight.shape)}; choose less"
                )
        denoiser.requires_grad_(False)
        for number, (name, layer) in enumerate(chosen):
            generator = torch.Generator().manual_seed((self.seed << 20) + number)
            difference = _LoRADelta(layer.weight, self.rank, self.alpha / self.rank, generator)
            if isinstance(layer, nn.Linear) and layer.weight.dtype not in (torch.bfloat16, torch.float16):
                parametrize.register_parametrization(layer, "weight", difference)
            else:
                denoiser.set_submodule(name, _AdaptedLinear(layer, difference))

    @staticmethod
    def is_applied(network: nn.Module) -> bool:
        """Whether there are adapters that are not merged."""
        adapted = any(isinstance(module, _AdaptedLinear) for module in network.modules())
        return adapted or any(True for _ in _lora_layers(network))

    def _target_layers(self, denoiser: nn.Module) -> list[tuple[str, _FrozenLinear]]:
        known = {name: each for name, each in denoiser.named_modules() if isinstance(each, nn.Linear | QuantizedLinear)}
        path_in_block = {
            layer: path for block in network_blocks(denoiser) for path, layer in block.named_modules() if path
        }
        inside = {name: path_in_block[layer] for name, layer in known.items() if layer in path_in_block}
        for target in self.target_modules:
            if not any(_matches_target(path, target) for path in inside.values()):
                raise ValueError(
                    f"no linear layer of a block is called {target!r};"
                    f" there are {', '.join(sorted(set(inside.values()))) or 'none'}"
                )
        if not inside:
            raise ValueError("LoRA needs linear layers inside blocks, and this network has none")
        wanted = [
            name
            for name, path in inside.items()
            if any(_matches_target(path, target) for target in self.target_modules)
            or (not self.target_modules and not any(_matches_target(path, kept) for kept in _NOT_ADAPTED))
        ]
        chosen = [(name, known[name]) for name in wanted]
        thick = [(name, layer) for name, layer in chosen if min(layer.weight.shape) >= self.rank]
        return chosen if self.target_modules or not thick else thick


_NOT_ADAPTED = ("modulation", "mlp.router")
"""Layers that are adapted only if they are named."""


class _LoRADelta(nn.Module):
    """W -> W + scaling B A, computed in float32 even where W is stored in less."""

    def __init__(self, weight: Weight, rank: int, scaling: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        stored = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.scaling, self.dtype = scaling, torch.promote_types(stored, torch.float32)
        start = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.a = nn.Parameter(start.to(weight.device, self.dtype))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=self.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        # Autocast would round W itself here.
        with torch.autocast(weight.device.type, enabled=False):
            changed = torch.addmm(weight.to(self.dtype), self.b, self.a, alpha=self.scaling)
        return changed.to(weight.dtype)

    def of_input(self, x: Tensor) -> Tensor:
        """scaling B A x, without the product B A."""
        return F.linear(F.linear(x, self.a), self.b) * self.scaling

    def matrix(self) -> Tensor:
        """scaling B A."""
        return torch.mm(self.b, self.a).mul_(self.scaling)


class _AdaptedLinear(nn.Module):
    """A frozen layer of few bits, and what is added to its output."""

    def __init__(self, base: _FrozenLinear, difference: _LoRADelta) -> None:
        super().__init__()
        self.base, self.difference = base, difference

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        added = self.difference.of_input(x if torch.is_autocast_enabled(x.device.type) else x.to(self.difference.dtype))
        return y + added.to(y.dtype)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer of 16 bits that computes the same to rounding."""
        base, difference = self.base, self.difference.matrix()
        if isinstance(base, QuantizedLinear):
            return base.to_linear(difference)
        return Linear.like(base, (base.weight.float() + difference).to(base.weight.dtype))


def merge_lora(denoiser: nn.Module) -> None:
    """Merge the adapters into the weights, in place: a plain network that computes the same to rounding.

    All its parameters can be trained again; names and shapes are those before `LoRA.apply`. Weights of 8 or 4 bits
    become bfloat16.
    """
    if not LoRA.is_applied(denoiser):
        raise ValueError("this network has no LoRA adapters to merge: call LoRA.apply() first")
    for layer in list(_lora_layers(denoiser)):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    modules = dict(denoiser.named_modules())
    for name, module in modules.items():
        if isinstance(module, _AdaptedLinear):
            denoiser.set_submodule(name, module.merged())
        elif isinstance(module, QuantizedLinear) and not isinstance(modules[name.rpartition(".")[0]], _AdaptedLinear):
            denoiser.set_submodule(name, module.to_linear())
    denoiser.requires_grad_(True)


def _lora_layers(denoiser: nn.Module) -> Iterator[nn.Linear]:
    for layer in denoiser.modules():
        if isinstance(layer, nn.Linear) and parametrize.is_parametrized(layer, "weight"):
            yield layer


def _matches_target(path: str, target: str) -> bool:
    return path == target or path.startswith(f"{target}.")
