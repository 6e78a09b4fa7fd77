"""How a model in training is spread over the ranks: replicas or shards.

A run means the same on 1, 2 or 64 ranks: each rank takes its rows of the global batch, losses are
summed and divided by the global count, and gradients are summed.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unmask.backbones.base import network_blocks
from unmask.distributed import Distributed

_SYNC_BUFFERS_ARG = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # its name since torch 2.13, and before
    if name in inspect.signature(DistributedDataParallel).parameters
)


@dataclass(frozen=True)
class DDP:
    """DDP: every rank holds the whole model."""

    def wrap(self, model: nn.Module, distributed: Distributed) -> nn.Module:
        """The module to call; gradients of a backward pass through it are averaged over the ranks."""
        if distributed.world_size == 1:
            return model
        # Buffers are constants, alike on every rank; gradients are summed where they are, not in a copy.
        options: dict[str, Any] = {_SYNC_BUFFERS_ARG: False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **options)


@dataclass(frozen=True)
class FSDP:
    """FSDP2: parameters, gradients and optimizer state are split over the ranks, block by block."""

    def wrap(self, model: nn.Module, distributed: Distributed) -> nn.Module:
        """The module to call; its parameters become distributed tensors."""
        if distributed.world_size == 1:
            return model
        from torch.distributed.fsdp import fully_shard

        for block in network_blocks(model):
            fully_shard(block)
        fully_shard(model)
        return model


Parallelism: TypeAlias = DDP | FSDP


class ParallelModel:
    """A model whose calls go through its DDP or FSDP wrapper; every other attribute is the model's own."""

    def __init__(self, model: nn.Module, wrapped: nn.Module) -> None:
        self.model, self.wrapped = model, wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def grad_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Around a backward pass: DDP averages the gradients over the ranks only if `enabled`."""
        if enabled or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()
