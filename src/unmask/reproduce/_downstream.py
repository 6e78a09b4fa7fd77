"""Classifiers that are trained from a cell's model: what an objective does to downstream tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unmask.classification import (
    LabelledData,
    Protocol,
    find_task,
    make_experiment,
    run_classification,
    task_data,
)
from unmask.reproduce._lab import Stopped
from unmask.reproduce._vocabulary import Estimate, Setup, TrainedModel

_FOLDS = 5
"""Parts into which the rows of a task are divided that has no training rows here: a seed tests one of them."""


def tasks_in(folder: Path | None, names: Sequence[str]) -> list[str]:
    """The tasks of which there are labelled rows in the folder."""
    found = []
    for name in names if folder is not None else ():
        try:
            find_task(name).splits(folder)
        except ValueError:
            continue
        found.append(name)
    return found


def downstream_scores(
    trained: TrainedModel, tasks: Sequence[str], folder: Path | None, metric: str | None = None, **changes: Any
) -> dict[str, Estimate]:
    """The figure of each task in percent, of one classifier from the cell's model with the cell's seed.

    A task with several test sets has several figures: the first by its name, the others by its name and theirs. Of a
    task without training rows, the test rows are divided. `metric`: another figure than the task's own; `changes`:
    other settings than the task's protocol has.
    """
    scores: dict[str, Estimate] = {}
    for name in tasks:
        task = find_task(name)
        divided = folder is not None and task.splits(folder)[0] is None
        data = task_data(name, folder, _FOLDS if divided else None)
        if divided:
            data = replace(data, fold=(trained.seed - 1) % _FOLDS)
        scores |= labelled_scores(trained, name, data, task.protocol, metric or task.metric, **changes)
    return scores


def labelled_scores(
    trained: TrainedModel, name: str, data: LabelledData, protocol: Protocol, metric: str, **changes: Any
) -> dict[str, Estimate]:
    """The figures of a classifier of labelled rows in percent; it is a run below the model's, which resumes like it."""
    experiment = make_experiment(str(trained.run / "model"), data, protocol, **changes).with_seed(trained.seed)
    result = run_classification(experiment, trained.run / "classifiers" / name, trained.distributed)
    if result is None:
        raise Stopped
    figures = {}
    for place, (test, evaluation) in enumerate(result.evaluations.items()):
        value = evaluation.metrics[metric].value or 0.0
        figures[f"{name}_{test}" if place else name] = Estimate(100 * value)
    return figures


def mean_score(scores: Mapping[str, Estimate]) -> Estimate:
    """The mean over tasks."""
    return Estimate(sum(score.value for score in scores.values()) / len(scores))


def short_protocol(setup: Setup, epochs: int) -> int:
    """Epochs of a classifier: the protocol's, or a single one if cells are shorter than two minutes."""
    return epochs if setup.minutes >= 2 or not setup.is_tiny else 1
