"""Start-up: from the command to the text of a small model, and how much of that is importing torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.side_by_side import time_once
from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer, save


@dataclass(frozen=True)
class Startup:
    """Seconds of each repeat."""

    sample: tuple[float, ...]
    torch: tuple[float, ...]
    help: tuple[float, ...]


def measure_startup(repeats: int = 5) -> Startup:
    """`unmask sample` on a 2 x 64 model, one token; the first run, which reads the files, is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        backbone = DiTConfig(width=64, depth=2, heads=2, max_length=64)
        save(LanguageModel.from_config(backbone, MDLM(), Tokenizer.bytes()), Path(folder) / "model")
        commands = {
            "sample": ["-m", "unmask", "sample", f"{folder}/model", "--length", "1", "--steps", "1"],
            "torch": ["-c", "import torch"],
            "help": ["-m", "unmask", "--help"],
        }
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats + 1):
            for name, arguments in commands.items():
                found[name].append(time_once(partial(_run, arguments)))
    return Startup(**{name: tuple(times[1:]) for name, times in found.items()})


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    print(measure_startup())
