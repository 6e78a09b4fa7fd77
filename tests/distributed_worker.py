"""Many runs of two ranks, started by tests as a process of its own: `ranks_worker.py FOLDER KIND...`.

Everything is imported once, and each rank is a fork that works, leaves its world and then ends as any
interpreter does. How the ranks of a run ended, and what they said on stderr, is a line of JSON on stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp  # here, so that no rank needs to
from torch import nn

from training import test_lora as test_lowrank
from unmask.distributed import init_distributed
from unmask.training._parallelism import DDP, FSDP, Parallelism


def train_two_steps(parallelism: Parallelism) -> None:
    """Two steps of the smallest network."""
    with init_distributed() as where:
        network = parallelism.wrap(nn.Linear(4, 4), where)
        for _ in range(2):
            network(torch.ones(2, 4)).sum().backward()
            where.all_reduce_scalars(1.0)


def exit_race() -> None:
    """Leave while a thread of the group, which a sharded model keeps, is slow to let go of a tensor."""
    global kept
    with init_distributed() as where:
        model = FSDP().wrap(nn.Linear(4, 4), where)
        tensor = torch.zeros(1)
        kept = model, weakref.ref(tensor, lambda _: hashlib.sha256(bytes(300_000_000)))
        time.sleep(0.3 * where.rank)
        dist.all_reduce(tensor, async_op=True)
        del tensor


def drop() -> None:
    """Drop the model, and the group with it, while a thread of the group is slow to release a tensor."""
    with init_distributed() as distributed:
        model = FSDP().wrap(nn.Linear(4, 4), distributed)
        tensor = torch.zeros(1)
        released = weakref.ref(tensor, lambda _: hashlib.sha256(bytes(300_000_000)))
        time.sleep(0.3 * distributed.rank)
        dist.all_reduce(tensor, async_op=True)
        del tensor
    del model, released


kept: Any = None

SCENARIOS: dict[str, Callable[[], None]] = {
    "sharded": lambda: train_two_steps(FSDP()),
    "replicated": lambda: train_two_steps(DDP()),
    "lowrank": test_lowrank.main,
    "race": exit_race,
    "drop": drop,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv[1:] = [str(folder)]
    torch.set_num_threads(1)


def run_scenarios(folder: Path, kinds: list[str]) -> Callable[[], None] | None:
    """Start and await the runs, and return None; in a fork, return its work."""
    for number, kind in enumerate(kinds):
        port, ranks, place = free_port(), [], folder / f"{number}"
        place.mkdir()
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                become_rank(rank, port, place)
                return SCENARIOS[kind]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        said = [(place / f"stderr-{rank}").read_text() for rank in range(2)]
        print(json.dumps({"kind": kind, "codes": codes, "stderr": said}), flush=True)
    return None


if __name__ == "__main__":
    work = run_scenarios(Path(sys.argv[1]), sys.argv[2:])
    if work is not None:
        work()
