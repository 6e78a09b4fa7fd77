"""All that knows of more than one process: torchrun's world, replicas, shards, and agreement.

A run means the same on 1, 2 or 64 ranks: each rank takes its rows of the global batch, losses are
summed and divided by the global count, and gradients are summed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unmask.diffusion.denoise import Around, Denoise
from unmask.types import LogX, Rows, Times, Tokens


@dataclass(frozen=True)
class World:
    """This process's place among those that `torchrun` started."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this rank speaks, writes and logs for all."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """The first of this rank's rows of a global batch, and how many they are."""
        first = rows * self.rank // self.size
        return first, rows * (self.rank + 1) // self.size - first

    def pieces(self, rows: int, largest: int | None) -> list[tuple[int, int]]:
        """This rank's rows in micro-batches (first, count) of at most `largest`: as many on every rank."""
        first, count = self.share(rows)
        longest = -(-rows // self.size)
        number = 1 if largest is None else -(-longest // largest)
        cuts = [count * i // number for i in range(number + 1)]
        return [(first + a, b - a) for a, b in itertools.pairwise(cuts)]

    def total(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank: all must act alike."""
        return self._reduce((float(flag),), dist.ReduceOp.MAX)[0] > 0

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()

    def _reduce(self, values: tuple[float, ...], op: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return [float(value) for value in tensor.tolist()]


@contextmanager
def world() -> Iterator[World]:
    """Join the processes of `torchrun`, if it started this one; leave them at the end."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Replicated:
    """DDP: every rank holds the whole model."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        """The module to call; gradients of a backward pass through it are averaged over the ranks."""
        return DistributedDataParallel(model) if world.size > 1 else model


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

    def __call__(self, z: Tokens, t: Times, rows: Rows, **context: Any) -> LogX:
        log_x: Tensor = self.wrapped(z, t, rows, **context)
        return log_x

    def gathering(self, last: bool) -> Any:
        """Gradients travel between ranks in the last micro-batch's backward pass only."""
        if last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()
