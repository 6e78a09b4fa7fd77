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

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.distributed import Distributed
from unmask.types import Positions, RowFn, Times, Tokens

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

        for module in model.modules():
            if type(module).__name__ == "Block":
                fully_shard(module)
        fully_shard(model)
        return model


Parallelism: TypeAlias = DDP | FSDP


class ParallelDenoiser(DenoiserWrapper):
    """A denoiser called through its wrapper, so that DDP and FSDP see the forward pass."""

    def __init__(self, denoiser: DenoiserLike, wrapped: nn.Module) -> None:
        super().__init__(denoiser)
        self.wrapped = wrapped

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        said: Tensor = self.wrapped(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)
        return said

    def grad_sync(self, last_microbatch: bool) -> Any:
        """Gradients travel between ranks in the last micro-batch's backward pass only."""
        if last_microbatch or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()
