"""Classifiers that are trained from a cell's model: what an objective does to downstream tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.classification import find_task, make_experiment, run_classification, task_data
from unmask.reproduce._lab import Stopped
from unmask.reproduce._vocabulary import Estimate, Setup, TrainedModel


def tasks_in(folder: Path | None, names: Sequence[str]) -> list[str]:
    """The tasks whose training rows are in the folder."""
    found = []
    for name in names if folder is not None else ():
        try:
            train = find_task(name).splits(folder)[0]
        except ValueError:
            continue
        if train is not None:
            found.append(name)
    return found


def downstream_scores(
    trained: TrainedModel, tasks: Sequence[str], folder: Path | None, metric: str | None = None, **changes: Any
) -> dict[str, Estimate]:
    """The figure of each task in percent, of one classifier from the cell's model with the cell's seed.

    The classifiers are runs below the model's, which resume like it. `metric`: another figure than the task's own;
    `changes`: other settings than the task's protocol has.
    """
    scores = {}
    for name in tasks:
        task = find_task(name)
        data = task_data(name, folder)
        experiment = make_experiment(str(trained.run / "model"), data, task.protocol, **changes)
        place = trained.run / "classifiers" / name
        result = run_classification(experiment.with_seed(trained.seed), place, trained.distributed)
        if result is None:
            raise Stopped
        figure = next(iter(result.evaluations.values())).metrics[metric or task.metric]
        scores[name] = Estimate(100 * (figure.value or 0.0))
    return scores


def mean_score(scores: Mapping[str, Estimate]) -> Estimate:
    """The mean over tasks."""
    return Estimate(sum(score.value for score in scores.values()) / len(scores))


def short_protocol(setup: Setup, epochs: int) -> int:
    """Epochs of a classifier: the protocol's, or a single one if cells are shorter than five minutes."""
    return epochs if setup.minutes >= 5 or not setup.is_tiny else 1
