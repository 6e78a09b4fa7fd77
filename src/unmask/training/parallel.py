"""How a model in training is spread over the ranks: replicas or shards.

A run means the same on 1, 2 or 64 ranks: each rank takes its rows of the global batch, losses are
summed and divided by the global count, and gradients are summed.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unmask.diffusion.denoise import Around, Denoise
from unmask.types import Rows, Times, Tokens
from unmask.world import World

_SENDS_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # its name since torch 2.13, and before
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass(frozen=True)
class Replicated:
    """DDP: every rank holds the whole model."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        """The module to call; gradients of a backward pass through it are averaged over the ranks."""
        if world.size == 1:
            return model
        # Buffers are constants, alike on every rank; gradients are summed where they are, not in a copy.
        options: dict[str, Any] = {_SENDS_BUFFERS: False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **options)


@dataclass(frozen=True)
class Sharded:
    """FSDP2: parameters, gradients and optimizer state are split over the ranks, block by block."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        """The module to call; its parameters become distributed tensors."""
        if world.size == 1:
            return model
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if type(module).__name__ == "Block":
                fully_shard(module)
        fully_shard(model)
        return model


Parallelism: TypeAlias = Replicated | Sharded


class Through(Around):
    """A denoiser called through its wrapper, so that DDP and FSDP see the forward pass."""

    def __init__(self, denoise: Denoise, wrapped: nn.Module) -> None:
        super().__init__(denoise)
        self.wrapped = wrapped

    def __call__(self, z: Tokens, t: Times, rows: Rows, **context: Any) -> Tensor:
        said: Tensor = self.wrapped(z, t, rows, **context)
        return said

    def gathering(self, last: bool) -> Any:
        """Gradients travel between ranks in the last micro-batch's backward pass only."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()
