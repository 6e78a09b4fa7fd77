"""Weak scaling over processes on this machine, compared with the prediction of the cost model.

    python -m benchmarks.weak_scaling        # 1, 2 and 3 processes of one thread each

Every process takes the same number of rows, so twice the processes do twice the work. Two independent
processes show what the machine allows; two cores cannot do the work of three.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.cost_model import GRADIENT_BYTES
from benchmarks.side_by_side import RandomTokens, median, time_once
from unmask import MDLM, DiTConfig
from unmask.data.loader import Loader, Wrapped
from unmask.distributed import Distributed, init_distributed
from unmask.hardware.flops import measure_peak_flops
from unmask.model import ModelConfig
from unmask.report.formatting import print_table
from unmask.reproduce import MASKED_FRACTION, ModelShape
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer
from unmask.types import Vocab

SIZE = ModelShape("small", depth=4, width=256, vocab=4096, length=256)
BATCH_SIZES, STEPS = (4, 16), 12
"""Windows per process and step: few, where gradient exchange counts most, and more."""


def worker(distributed: Distributed, batch_size: int) -> dict[str, float]:
    """Train for a few steps and print the measurements."""
    backbone = DiTConfig(SIZE.width, SIZE.depth, heads=4, max_length=SIZE.length, dropout=0.0)
    denoise = ModelConfig(Vocab(SIZE.vocab, SIZE.vocab - 1), backbone, MDLM()).build().train()
    text = RandomTokens.generate(1 << 20, SIZE.vocab)
    batch = batch_size * distributed.world_size
    settings = TrainingConfig(steps=1000, batch_size=batch, optimizer=AdamW(), warmup_steps=0, bf16=False)
    loader = Loader(text, Wrapped(SIZE.length), batch)
    run = Trainer(denoise, DenoisingLoss(MDLM()), loader, settings, distributed=distributed)
    for _ in range(3):
        run.step()
    times = [time_once(run.step) for _ in range(STEPS)]
    distributed.barrier()
    peak = measure_peak_flops(torch.float32, torch.device("cpu"))
    return {"seconds": median(times), "peak": peak, "bandwidth": _bandwidth(distributed)}


def _bandwidth(distributed: Distributed) -> float:
    """Bytes per second of an all-reduce of the size of the model."""
    if distributed.world_size == 1:
        return float("inf")
    numbers = torch.ones(SIZE.parameters)
    times = []
    for _ in range(4):
        distributed.barrier()
        times.append(time_once(lambda: torch.distributed.all_reduce(numbers)))
    return (
        2 * (distributed.world_size - 1) / distributed.world_size * GRADIENT_BYTES * SIZE.parameters / median(times[1:])
    )


def run_groups(batch_size: int, ranks: int, groups: int) -> dict[str, float]:
    """Run `groups` of so many processes of one thread at once, and take their mean."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    running = [
        subprocess.Popen(
            [*command, __file__, "worker", str(batch_size)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(groups)
    ]
    outputs = [process.communicate()[0].decode() for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(
            f"{ranks} processes could not be run; try: python -m benchmarks.weak_scaling worker {batch_size}"
        )
    results: list[dict[str, float]] = [json.loads(each.strip().splitlines()[-1]) for each in outputs]
    return {name: statistics.mean(each[name] for each in results) for name in results[0]}


def print_scaling_table(batch_size: int, repeats: int = 3) -> None:
    """A table of medians, each with its range: in turns, because the machine's speed changes by the minute.

    The prediction takes the speed of one process as given, and divides the cores among more than there are.
    """
    tokens, cores = batch_size * SIZE.length, os.cpu_count() or 1
    ways = {"1": (1, 1), "2, independent": (1, 2), "2": (2, 1), "3": (3, 1)}
    turns = [{name: run_groups(batch_size, *way) for name, way in ways.items()} for _ in range(repeats)]
    lines = []
    for name, (ranks, groups) in ways.items():
        here = [turn[name] for turn in turns]
        alone = [turn["1"] for turn in turns]
        predicted = []
        for one, each in zip(alone, here, strict=True):
            talk = 2 * (ranks - 1) / ranks * GRADIENT_BYTES * SIZE.parameters / each["bandwidth"]
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
    print(f"{SIZE.parameters / 1e6:.1f}M parameters, {tokens} tokens a process and step, {MASKED_FRACTION:.0%} masked")
    header = ("processes", "tokens/s", "efficiency", "step", "predicted", "GFLOP/s each", "GB/s")
    print_table(header, lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        with init_distributed() as here:
            results = worker(here, int(sys.argv[2]))
            if here.is_main:
                print(json.dumps(results))
    else:
        for rows in BATCH_SIZES:
            print_scaling_table(rows)
