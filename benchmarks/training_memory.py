"""Peak memory of a training step, each variant in its own process, including what the allocator holds back.

python -m benchmarks.training_memory float32|bfloat16|ours|recompute

The first two are the reference implementation, of which the one that needs less is compared.

With MALLOC_MMAP_THRESHOLD_=4000000 freed large blocks are returned to the system: the figure is then memory in use.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from benchmarks.side_by_side import PRECISIONS, Result, unmask_uses_bf16
from benchmarks.training import baseline_trainer, random_batch, unmask_trainer
from examples.mdlm_reference import ModelSize

SIZE = ModelSize(vocab=50_258, depth=8, width=512, length=1024)
BATCH = 8


def measure_memory(way: str = "ours") -> Result:
    """Of the second step, because the optimizer's state appears in the first; the reference's steps are long,
    so its first one is of a few tokens."""
    work = f"peak memory of a training step, V = 50,258, 8 x 512, batch {BATCH} x {SIZE.length:,}"
    if way == "recompute":
        work = "the same with training.gradient_checkpointing"
    precision = min(PRECISIONS, key=_peak_memory_of)
    return Result(work, precision, (_peak_memory_of(precision),), (_peak_memory_of(way),), unit="GB")


@cache
def _peak_memory_of(way: str) -> float:
    command = [sys.executable, "-m", "benchmarks.training_memory", way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return float(done.stdout)


def _peak_memory() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1e6
    raise SystemExit("this machine does not tell a process' peak memory")


if __name__ == "__main__":
    if sys.argv[1] in PRECISIONS:  # each variant runs alone
        trainer, text = baseline_trainer(SIZE, PRECISIONS[sys.argv[1]]), random_batch(SIZE, BATCH)
        trainer.step(text[:1, :8])
        trainer.step(text)
    else:
        run = unmask_trainer(SIZE, BATCH, unmask_uses_bf16())
        run.model.backbone.gradient_checkpointing = sys.argv[1] == "recompute"
        run.step()
        run.step()
    print(_peak_memory())
