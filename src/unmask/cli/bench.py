"""The command that measures speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def bench(only: tuple[str, ...] = (), out: Path = Path("runs/bench")) -> None:
    """Compare our speed with the paper's own way of doing it, here and now.

    For example:
      unmask bench
      unmask bench --only sampling startup

    Args:
        only: Parts of the names of what is to be measured, all of it if there are none.
        out: Where the figures (bench.json) and a plot go.
    """
    if not (ROOT / "benchmarks" / "__main__.py").is_file():
        raise ValueError("the benchmarks come with the source tree: clone it, and run `make bench` there")
    chosen = ["--only", *only] if only else []
    command = [sys.executable, "-m", "benchmarks", "--out", str(out.resolve()), *chosen]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
