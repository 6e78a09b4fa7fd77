"""Peak memory of a training step, each way in a process of its own.

python -m benchmarks.memory ours
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.textbook import Size
from benchmarks.training import steps

SIZE = Size(vocab=50_258, depth=8, width=512, length=1024)
BATCH = 8


def measured() -> Result:
    """Two steps, because the optimizer's state appears in the first; of the textbook, whose steps are long,
    one: that leaves out the 0.6 GB of its optimizer."""
    peaks = [
        float(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.memory", way],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parents[1],
            ).stdout
        )
        for way in ("textbook", "ours")
    ]
    work = f"peak memory of a training step, V = 50,258, 8 x 512, batch {BATCH} x {SIZE.length:,}"
    return Result(work, 4, (peaks[0],), (peaks[1],), unit="GB")


def _peak() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1e6
    raise SystemExit("this machine does not tell a process' peak memory")


if __name__ == "__main__":
    trainer, run = steps(SIZE, BATCH)
    text = run.loader.batch(0).tokens
    if sys.argv[1] == "ours":
        del trainer  # each way is alone
        run.step()
        run.step()
    else:
        del run
        trainer.step(text)
    print(_peak())
