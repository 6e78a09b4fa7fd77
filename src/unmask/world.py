"""The processes that share a piece of work: torchrun's world, how its ranks agree, and how they leave."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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
    atexit.unregister(let_threads_rest)
    atexit.register(let_threads_rest)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()  # nobody leaves while another may still be talking to it
    finally:
        dist.destroy_process_group()


def leave(code: int) -> None:
    """End this process, if it is a rank of many, at once: with its atexit work done, but its threads at work.

    The threads of a process group live as long as anything keeps the group: a sharded model, or the meshes
    in DTensor's caches, which last to the end. One of them that lets go of a tensor, or fails because another
    rank is gone, while the interpreter takes itself apart would abort the process, whatever its code.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by its reader, or by us
            stream.flush()
    os._exit(code)


def let_threads_rest() -> None:
    """Wait until gloo's threads have let go of the last tensor, for programs that never call `leave`.

    A thread that has work to do runs or waits for a processor; none sleeps for long, as this one has released
    the interpreter.
    """
    quiet = 0
    for _ in range(500):  # five seconds, or more on a busy machine
        quiet = quiet + 1 if all(state == "S" for state in _states_of_gloo()) else 0
        if quiet == 3:
            return
        time.sleep(0.01)


def _states_of_gloo() -> Iterator[str]:
    """Whether each thread of gloo sleeps (S) or runs (R), as Linux tells it; nothing elsewhere."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread is gone
            name, _, rest = file.read_text().partition(" (")[2].rpartition(") ")
            if "gloo" in name:
                yield rest[0]
