"""Process groups and collectives: the ranks that torchrun started, what they sum, and how they exit."""

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
class Distributed:
    """This process's place among those that `torchrun` started."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and logs for all."""
        return self.rank == 0

    def shard(self, global_batch_size: int) -> tuple[int, int]:
        """The first of this rank's rows of a global batch, and how many they are."""
        first = global_batch_size * self.rank // self.world_size
        return first, global_batch_size * (self.rank + 1) // self.world_size - first

    def microbatches(self, global_batch_size: int, max_size: int | None) -> list[tuple[int, int]]:
        """This rank's rows in micro-batches (first, count) of at most `max_size`: as many on every rank."""
        first, count = self.shard(global_batch_size)
        longest = -(-global_batch_size // self.world_size)
        number = 1 if max_size is None else -(-longest // max_size)
        cuts = [count * i // number for i in range(number + 1)]
        return [(first + a, b - a) for a, b in itertools.pairwise(cuts)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, which are alike in shape; exact where all but one are zero."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_scalars(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        if self.world_size == 1:
            return [float(value) for value in values]
        summed: list[float] = self.all_reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        return summed

    def all_reduce_max(self, value: float) -> float:
        """The largest of the ranks' values."""
        if self.world_size == 1:
            return value
        return float(self._all_reduce(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX))

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.all_reduce_max(float(flag)) > 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        shared = tensor.to(self.device, copy=True)
        dist.all_reduce(shared, op=op)
        return shared.to(tensor.device)


@contextmanager
def init_distributed() -> Iterator[Distributed]:
    """Join the processes of `torchrun`, if it started this one; leave them at the end."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Distributed(device=device)
        return
    atexit.unregister(_wait_for_gloo_threads)
    atexit.register(_wait_for_gloo_threads)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Distributed(dist.get_rank(), dist.get_world_size(), device)
        dist.barrier()  # no rank exits while another may still communicate with it
    finally:
        # A thread of the group that still has to release a tensor needs the interpreter's lock. Whoever drops the
        # last reference to the group holds that lock and waits for the thread: neither would ever continue.
        _wait_for_gloo_threads()
        dist.destroy_process_group()


def exit_rank(code: int) -> None:
    """Exit at once if this is one of several ranks: atexit handlers run, but threads are not joined.

    The threads of a process group live as long as anything references the group: a sharded model, or the meshes in
    DTensor's caches, which are never freed. A thread that releases a tensor, or fails because another rank has exited,
    during interpreter shutdown would abort the process, whatever its exit code.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by its reader, or by us
            stream.flush()
    os._exit(code)


def _wait_for_gloo_threads() -> None:
    """Wait until gloo's threads have let go of the last tensor, for programs that never call `leave`.

    A thread that has work to do runs or waits for a processor; none sleeps for long, as this one has released
    the interpreter.
    """
    quiet = 0
    for _ in range(500):  # five seconds, or more on a busy machine
        quiet = quiet + 1 if all(state == "S" for state in _gloo_thread_states()) else 0
        if quiet == 3:
            return
        time.sleep(0.01)


def _gloo_thread_states() -> Iterator[str]:
    """Whether each thread of gloo sleeps (S) or runs (R), as Linux reports it; empty on other systems."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            name, _, rest = file.read_text().partition(" (")[2].rpartition(") ")
            if "gloo" in name:
                yield rest[0]
