"""Seconds and memory of loading a model of 1.3 billion weights that were saved in bfloat16.

    python -m benchmarks.loading [--commit COMMIT] [--dtypes auto int8 int4] [--depth 16] [--repeats 2]

A folder in LLaDA's layout is written first. Each loading is a process of its own: seconds, the most memory that it held
beyond what the libraries take, and the size of the weights. With a COMMIT, that version loads the same folder in turns,
and the ratios of seconds are printed: below 1/6 was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.before_after import ROOT, checked_out
from benchmarks.llada_shape import LLaDAShape, write_llada

_PROGRAM = """
import json, sys, time
import torch, unmask
import unmask.pretrained
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
before, started = peak(), time.perf_counter()
options = {} if sys.argv[2] == "old" else {"dtype": sys.argv[2]}
lm = unmask.load(sys.argv[1], **options)
seconds = time.perf_counter() - started
held = sum(tensor.nbytes for tensor in {**dict(lm.denoiser.named_parameters())}.values())
print(json.dumps({"seconds": seconds, "peak": peak() - before, "weights": held}))
"""


def measure(folder: Path, dtype: str, tree: Path = ROOT) -> dict[str, float]:
    """Seconds, peak and size in bytes of one loading, by the code of a source tree; `old`: without a dtype."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", _PROGRAM, str(folder), dtype]
    done = subprocess.run(command, env=environment, cwd=tree, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _describe(name: str, figures: dict[str, float]) -> str:
    sizes = f"weights {figures['weights'] / 1e9:5.2f} GB, peak {figures['peak'] / 1e9:5.2f} GB"
    return f"{name:10} {figures['seconds']:7.2f} s, {sizes}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each loading."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.split("\n")[0])
    parser.add_argument("--commit", help="an earlier version to compare with")
    parser.add_argument("--dtypes", nargs="*", default=["auto", "int8", "int4"])
    parser.add_argument("--depth", type=int, default=LLaDAShape.depth)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    shape = LLaDAShape(depth=options.depth)
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_llada(Path(scratch) / "llada", shape)
        print(f"{shape.num_parameters / 1e9:.2f} billion weights")
        with nullcontext() if options.commit is None else checked_out(options.commit) as tree:
            for _ in range(options.repeats):
                old = None if tree is None else measure(folder, "old", tree)
                if old is not None:
                    print(_describe(options.commit[:10], old))
                for dtype in options.dtypes:
                    new = measure(folder, dtype)
                    ratio = "" if old is None else f", {new['seconds'] / old['seconds']:.3f} of the seconds before"
                    print(_describe(dtype, new) + ratio, flush=True)


if __name__ == "__main__":
    main()
