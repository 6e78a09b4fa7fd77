"""`unmask.train`: train a model on texts in one call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unmask.config import external_kinds, lookup
from unmask.distributed import init_distributed
from unmask.experiment import Experiment
from unmask.io.atomic import atomic_file
from unmask.model import LanguageModel
from unmask.pretrained import load, save
from unmask.recipes import RECIPES, finetune
from unmask.run.experiment_run import run_experiment
from unmask.training.run_folder import RunFolder


def train(
    model: LanguageModel | Experiment | str,
    texts: Sequence[str] | str | Path,
    folder: str | Path | None = None,
    **training: Any,
) -> LanguageModel:
    """Train a model on your texts, with progress on standard error; the trained model, with averaged weights.

        lm = unmask.train("stdlib-tiny", ["first text", "second text"], steps=200)
        lm = unmask.train(unmask.load("runs/demo"), "notes/", "runs/notes", steps=500, batch_size=8)

    `model`: a model to fine-tune (as the recipe `finetune` does), the name of a recipe, or an `Experiment`. `texts`:
    a list of texts, or a path as `unmask prepare` takes it. `training`: settings of `TrainingConfig`. With a
    `folder`, the run is kept there, and the same call resumes it or, with more steps, extends it.
    """
    with TemporaryDirectory() as temporary, init_distributed() as distributed:
        if folder is None and distributed.world_size > 1:
            raise ValueError("several processes need a shared folder: pass folder=")
        run = RunFolder(Path(folder or temporary), distributed)
        experiment = _experiment(model, texts, run)
        experiment = replace(experiment, training=replace(experiment.training, **training))
        allowed = external_kinds(experiment)
        if not run_experiment(experiment, run.path, distributed, allow_code=allowed):
            raise KeyboardInterrupt("a signal stopped the training")
        return load(run.model, allow_code=allowed)


def _experiment(
    model: LanguageModel | Experiment | str, texts: Sequence[str] | str | Path, run: RunFolder
) -> Experiment:
    """The experiment that `train` runs. Texts and models in memory are written into its folder first."""
    inputs = run.path / "inputs"
    if isinstance(model, LanguageModel) and run.distributed.is_main:
        save(model, inputs / "model", overwrite=True)
    source = str(texts) if isinstance(texts, str | Path) else str(inputs / "texts.jsonl")
    if not isinstance(texts, str | Path) and run.distributed.is_main:
        inputs.mkdir(parents=True, exist_ok=True)
        with atomic_file(Path(source)) as file:
            file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")
    run.distributed.barrier()
    if isinstance(model, LanguageModel):
        return replace(finetune().with_init_from(str(inputs / "model"), model), sources=(source,))
    experiment = lookup(model, RECIPES, "recipe")() if isinstance(model, str) else model
    return replace(experiment, sources=(source,))
