"""Carry out an experiment in a folder: prepare text, train or resume, export the model.

Running the same experiment in the same folder again resumes it; with more steps, it extends it. Another
experiment in the same folder is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from unmask.config import external_kinds, to_json
from unmask.data.corpus import Corpus
from unmask.data.loader import Loader
from unmask.distributed import Distributed
from unmask.evaluation.evaluate import EVAL_BATCH_SIZE
from unmask.experiment import Experiment
from unmask.likelihood import seeded_generator
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.registry import AllowCode
from unmask.run._build import build_trainer
from unmask.run._prepare import load_init_model, prepare_corpus, read_experiment
from unmask.run.export import export_model
from unmask.training.logger import TrainingLogger
from unmask.training.loop import train as run_training_loop
from unmask.training.run_folder import RunFolder
from unmask.training.trainer import Trainer
from unmask.types import ProgressFn


def run_experiment(
    experiment: Experiment,
    folder: Path,
    distributed: Distributed,
    *,
    prepare_progress: AbstractContextManager[ProgressFn | None] | None = None,
    restart: bool = False,
    allow_code: AllowCode = False,
) -> bool:
    """Prepare, train (or resume, or extend) and export; False if a signal stopped it before its end.

    `prepare_progress` is entered while text is prepared, and gives a function that is called with the bytes
    done so far. `restart`: begin at step 1 again; what was there is kept in another folder. `allow_code`: which
    classes from outside the package the folder, the tokenizer and `init_from` may name, as in `unmask.load`.
    """
    # What the caller's experiment is made of has been imported already.
    allowed = True if allow_code is True else {*(allow_code or ()), *external_kinds(experiment)}
    run = RunFolder(folder, distributed, allow_code=allowed)
    init_model = load_init_model(experiment, run)
    with run.claim():
        with prepare_progress or nullcontext() as progress:
            corpus = prepare_corpus(experiment, run, progress, init_model)
        trainer = build_trainer(experiment, corpus, distributed, init_model)
        init_model = None  # its weights were copied: their memory is needed
        messages = _write_settings(experiment, run, corpus, trainer) if distributed.is_main else []
        distributed.barrier()
        messages = run.resume(trainer, restart) + messages
        if trainer.state.step == 0:
            messages = [*corpus.describe(experiment.layout), *messages]
        finished = _train(experiment, corpus, trainer, run, messages)
        if finished:
            export_model(experiment, corpus, trainer, run)
        distributed.barrier()
    return finished


def _write_settings(experiment: Experiment, run: RunFolder, corpus: Corpus, trainer: Trainer) -> list[str]:
    """Write what is trained in the folder, if it is new or extended; messages for the log."""
    run.write_model_config(to_json(trainer.model.config))
    stored, steps = run.read_experiment(), experiment.training.steps
    if stored is None:
        run.write_experiment(experiment.fixed_settings(), corpus.digest, [])
        return []
    before = read_experiment(run).training.steps
    if before == steps:
        return []
    extended_from = [*stored.get("extended_from", []), before]
    run.write_experiment(experiment.fixed_settings(), corpus.digest, extended_from)
    return [
        f"extended from {before:,} to {steps:,} steps: from here on, learning rate and curriculum follow a run of"
        f" {steps:,} steps"
    ]


def _train(experiment: Experiment, corpus: Corpus, trainer: Trainer, run: RunFolder, messages: list[str]) -> bool:
    """Train to the end, or to a signal (then False); there is nothing to do if the end was reached before."""
    config, quiet = experiment.training, not run.distributed.is_main
    log = TrainingLogger(run.path, config.steps, trainer.state.step, quiet, config.trackers)
    if trainer.state.step >= config.steps:
        log.info(
            f"already finished: {config.steps:,} steps; the model is in {run.model}. --restart trains anew, and a"
            " larger training.steps goes on"
        )
        return True
    with log:
        for message in messages:
            log.info(message)
        return run_training_loop(trainer, run.checkpoints, log, lambda: _evaluate(experiment, corpus, trainer))


def _evaluate(experiment: Experiment, corpus: Corpus, trainer: Trainer) -> dict[str, float]:
    """Held-out nats per token; the held-out loss, for a model that has no likelihood."""
    if "valid" not in corpus.splits:
        return {}
    split = corpus.splits["valid"]
    layout = experiment.layout.with_length(min(experiment.layout.length, split.num_tokens))
    loader = Loader(split, layout, batch_size=min(EVAL_BATCH_SIZE, experiment.eval_windows))
    config = EvalConfig(experiment.eval_windows, replicates=4)
    with torch.no_grad():
        if experiment.objective.why_no_likelihood is not None:
            return {"valid_loss": _held_out_loss(experiment, loader, trainer, config)}
        score = score_corpus(trainer.model, experiment.objective, loader, config, distributed=trainer.distributed)
    return {"valid_nats_per_token": score.nats_per_token, "valid_standard_error": score.standard_error}


def _held_out_loss(experiment: Experiment, loader: Loader, trainer: Trainer, config: EvalConfig) -> float:
    """The training loss of held-out rows, with the same noise at every evaluation; every rank computes it whole."""
    total = count = 0.0
    rows = min(config.windows or loader.num_sequential_rows, loader.num_sequential_rows)
    for replicate in range(config.replicates):
        for start in range(0, rows, loader.batch_size):
            batch = loader.sequential_batch(start, loader.batch_size, num_windows=rows)
            batch = replace(batch, row_offset=0, global_batch_size=None).to(trainer.device)
            generator = seeded_generator(config.seed, replicate, start)
            loss = experiment.objective.training_loss(trainer.model, batch, generator)
            total, count = total + float(loss.total), count + float(loss.count)
    return total / max(1.0, count)
