"""Many processes on this machine: weak scaling, and the cost model's prediction beside it.

    python -m benchmarks.ranks        # 1, 2 and 3 processes of one thread each

Every process takes the same rows, so twice the processes do twice the work. Two that know nothing of each
other show what the machine itself can give; two cores cannot do the work of three.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.costs import GRADIENT, MASKED, Model
from benchmarks.measure import RandomText, median, timed
from unmask import MDLM, DiTConfig
from unmask.cli.table import print_table
from unmask.data.loader import Loader, Wrapped
from unmask.model import ModelConfig
from unmask.training.loop import Run, Training
from unmask.training.machine import matmul_peak
from unmask.training.optim import AdamW
from unmask.types import Vocab
from unmask.world import World, world

SIZE = Model("small", depth=4, width=256, vocab=4096, length=256)
ROWS, STEPS = (4, 16), 12
"""Windows that a process takes in a step: few, where exchanging gradients counts most, and more."""


def worker(here: World, rows: int) -> dict[str, float]:
    """Train for a few steps, and say how it went."""
    backbone = DiTConfig(SIZE.width, SIZE.depth, heads=4, length=SIZE.length, dropout=0.0)
    denoise = ModelConfig(Vocab(SIZE.vocab, SIZE.vocab - 1), backbone, MDLM()).build().train()
    text = RandomText.of(1 << 20, SIZE.vocab)
    batch = rows * here.size
    settings = Training(steps=1000, batch_size=batch, optimizer=AdamW(), warmup=0, bf16=False)
    run = Run(denoise, MDLM(), Loader(text, Wrapped(SIZE.length), batch), settings, here)
    for _ in range(3):
        run.step()
    times = [timed(run.step) for _ in range(STEPS)]
    here.barrier()
    peak = matmul_peak(torch.float32, torch.device("cpu"))
    return {"seconds": median(times), "peak": peak, "bandwidth": _bandwidth(here)}


def _bandwidth(here: World) -> float:
    """Bytes a second of summing as many numbers as the model has."""
    if here.size == 1:
        return float("inf")
    numbers = torch.ones(SIZE.parameters)
    times = []
    for _ in range(4):
        here.barrier()
        times.append(timed(lambda: torch.distributed.all_reduce(numbers)))
    return 2 * (here.size - 1) / here.size * GRADIENT * SIZE.parameters / median(times[1:])


def measured(rows: int, ranks: int, groups: int) -> dict[str, float]:
    """Run `groups` of so many processes of one thread at once, and take their mean."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    running = [
        subprocess.Popen(
            [*command, __file__, "worker", str(rows)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(groups)
    ]
    said = [process.communicate()[0].decode() for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{ranks} processes could not be run; try: python -m benchmarks.ranks worker {rows}")
    found: list[dict[str, float]] = [json.loads(each.strip().splitlines()[-1]) for each in said]
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def table(rows: int, repeats: int = 3) -> None:
    """A table of medians, each with its range: in turns, because the machine's speed changes by the minute.

    The prediction takes the speed of one process as given, and divides the cores among more than there are.
    """
    tokens, cores = rows * SIZE.length, os.cpu_count() or 1
    ways = {"1": (1, 1), "2, strangers": (1, 2), "2": (2, 1), "3": (3, 1)}
    turns = [{name: measured(rows, *way) for name, way in ways.items()} for _ in range(repeats)]
    lines = []
    for name, (ranks, groups) in ways.items():
        here = [turn[name] for turn in turns]
        alone = [turn["1"] for turn in turns]
        predicted = []
        for one, each in zip(alone, here, strict=True):
            talk = 2 * (ranks - 1) / ranks * GRADIENT * SIZE.parameters / each["bandwidth"]
            predicted.append(one["seconds"] * max(1.0, ranks * groups / cores) + talk)
        kept = [one["seconds"] / each["seconds"] for one, each in zip(alone, here, strict=True)]
        seconds = median([each["seconds"] for each in here])
        lines.append(
            (
                name,
                f"{ranks * groups * tokens / seconds:,.0f}",
                f"{median(kept):.0%} ({min(kept):.0%} to {max(kept):.0%})",
                f"{seconds * 1e3:.0f} ms",
                f"{median(predicted) * 1e3:.0f} ms",
                f"{median([each['peak'] for each in here]) / 1e9:.0f}",
                "-" if ranks == 1 else f"{median([each['bandwidth'] for each in here]) / 1e9:.1f}",
            )
        )
    print(f"{SIZE.parameters / 1e6:.1f}M parameters, {tokens} tokens a process and step, {MASKED:.0%} masked")
    header = ("processes", "tokens/s", "efficiency", "step", "predicted", "GFLOP/s each", "GB/s")
    print_table(header, lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        with world() as here:
            found = worker(here, int(sys.argv[2]))
            if here.first:
                print(json.dumps(found))
    else:
        for rows in ROWS:
            table(rows)
