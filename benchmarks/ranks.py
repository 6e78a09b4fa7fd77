"""Many processes on this machine: weak scaling, and the cost model's prediction beside it.

    python -m benchmarks.ranks        # 1, 2 and 3 processes of one thread each

Every process takes the same rows, so twice the processes do twice the work. Two cores cannot do the work of
three: there the model says what sharing costs.
"""

from __future__ import annotations

import json
import os
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
ROWS, STEPS = 4, 12


def worker(here: World) -> dict[str, float]:
    """Train for a few steps, and say how it went."""
    backbone = DiTConfig(SIZE.width, SIZE.depth, heads=4, length=SIZE.length, dropout=0.0)
    denoise = ModelConfig(Vocab(SIZE.vocab, SIZE.vocab - 1), backbone, MDLM()).build().train()
    text = RandomText.of(1 << 20, SIZE.vocab)
    batch = ROWS * here.size
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


def measured(ranks: int) -> dict[str, float]:
    """Run so many processes of one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    said = subprocess.run(
        [*command, __file__, "worker"], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(said.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """A table; the prediction takes the share of the peak that one process reaches as given."""
    tokens = ROWS * SIZE.length
    found = {ranks: measured(ranks) for ranks in (1, 2, 3)}
    alone = found[1]
    share = tokens * SIZE.flops_per_token / alone["seconds"] / alone["peak"]
    lines = []
    for ranks, each in found.items():
        compute = tokens * SIZE.flops_per_token / (share * each["peak"])
        talk = 2 * (ranks - 1) / ranks * GRADIENT * SIZE.parameters / each["bandwidth"]
        lines.append(
            (
                str(ranks),
                f"{ranks * tokens / each['seconds']:,.0f}",
                f"{alone['seconds'] / each['seconds']:.0%}",
                f"{each['seconds'] * 1e3:.0f} ms",
                f"{(compute + talk) * 1e3:.0f} ms",
                f"{each['peak'] / 1e9:.0f}",
                "-" if ranks == 1 else f"{each['bandwidth'] / 1e9:.1f}",
            )
        )
    print(f"{SIZE.parameters / 1e6:.1f}M parameters, {tokens} tokens a process and step, {MASKED:.0%} masked")
    header = ("processes", "tokens/s", "efficiency", "step", "predicted", "GFLOP/s each", "GB/s")
    print_table(header, lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        with world() as here:
            found = worker(here)
            if here.first:
                print(json.dumps(found))
    else:
        main()
