"""The processes that share a piece of work: torchrun's world, and how its ranks agree."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, which are alike in shape; exact where all but one are zero."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def total(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        summed: list[float] = self.summed(torch.tensor(values, dtype=torch.float64)).tolist()
        return summed

    def largest(self, value: float) -> float:
        """The largest of the ranks' values."""
        return float(self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX))

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank: all must act alike."""
        return self.largest(float(flag)) > 0

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()

    def _reduced(self, tensor: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return tensor
        shared = tensor.to(self.device, copy=True)
        dist.all_reduce(shared, op=op)
        return shared.to(tensor.device)


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
        dist.barrier()  # nobody leaves while another may still be talking to it
    finally:
        dist.destroy_process_group()
