"""A reproduction so small that a cell takes a second; as a program, it can be killed in the middle of one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unmask import reproduce
from unmask.backbones.dit import DiTConfig
from unmask.cli import main
from unmask.data.loader import Wrapped
from unmask.experiment import Experiment
from unmask.reproduce import TABLES, _lab, _reproduce, _trainings

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran", "to", "some", "dog", "with", "ears"]
TINY: Experiment = replace(
    _trainings._TINY,
    tokenizer="bytes",
    backbone=DiTConfig(width=16, depth=1, heads=2, max_length=16, dropout=0.0),
    layout=Wrapped(16),
    training=replace(_trainings._TINY.training, batch_size=4),
    eval_windows=8,
)


def shrink(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Make the world tiny: two methods, two learning rates, a network of one block."""
    set_attribute(_trainings, "_TINY", TINY)
    set_attribute(_lab, "RATE_FACTORS", (1.0, 2.0))
    lm = replace(TABLES["lm"], trainings=lambda setup: _trainings.text_trainings(setup, "mdlm", "ar"))
    set_attribute(_reproduce, "TABLES", {**TABLES, "lm": lm})
    set_attribute(reproduce, "TABLES", {**TABLES, "lm": lm})


def write_data(folder: Path) -> Path:
    """A data folder with a text of 40,000 characters."""
    source = random.Random(0)
    lines = (" ".join(source.choices(WORDS, k=12)) for _ in range(800))
    (folder / "wikitext2").mkdir(parents=True)
    (folder / "wikitext2" / "train.tokens").write_text("\n".join(lines))
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    shrink(setattr)
    sys.argv = ["unmask", *sys.argv[1:]]
    main()
