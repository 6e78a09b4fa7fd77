"""Tasks of lm-evaluation-harness, and their figures with errors and definitions.

A figure has two errors. The one over documents is what other documents of the kind would change; the harness reports
it, and where it does not, documents are drawn again with replacement. The Monte-Carlo error is what other maskings
would change: every likelihood is drawn again from a normal distribution of its own standard error, and the figure is
computed from them. It is 0 for likelihoods without an error.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import evaluate
from lm_eval.tasks import TaskManager

from unmask.config import suggest
from unmask.evaluation.harness._definitions import Definition
from unmask.evaluation.harness._model import HarnessModel
from unmask.io.errors import first_line, silenced_loggers
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session

_RESAMPLES = 100
"""How often a figure is computed again for an error."""
_BOOTSTRAP_ITERATIONS = 1000
"""The harness's own resamples, for the figures that it gives an error to."""


@dataclass(frozen=True)
class TaskConfig:
    """Which documents of which tasks, and how they are asked."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags of lm-evaluation-harness, or of a task's YAML file."""
    limit: int | None = None
    """Only the first documents of each task."""
    num_fewshot: int | None = None
    """Examples before each question; None leaves it to the task."""
    include_path: Path | None = None
    """A folder with tasks of one's own."""
    apply_chat_template: bool = False
    """Ask in the chat format of the model."""
    confirm_run_unsafe_code: bool = False
    """Run tasks that execute the code that a model writes."""
    seed: int = 0
    """Chooses the examples before a question."""

    def __post_init__(self) -> None:
        for name, value, least in (("limit", self.limit, 1), ("num_fewshot", self.num_fewshot, 0)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        if self.include_path is not None and not self.include_path.is_dir():
            raise ValueError(f"{self.include_path} is not a folder with tasks")


@dataclass(frozen=True)
class TaskFigure:
    """One metric of one task."""

    task: str
    metric: str
    filter: str
    """What was taken from answers: `none`, or the name of a filter of the task."""
    value: float
    standard_error: float | None
    """Over documents; None if there are too few."""
    monte_carlo_error: float | None
    """Over maskings; None where nothing is drawn, as in generated answers, and for groups of tasks."""
    documents: int
    num_fewshot: int | None
    definition: str
    """The name of the definition."""
    tokens_per_call: float | None
    """Of generated answers: tokens for each network call that a sequence took part in."""
    version: str
    """The version of the task."""


@dataclass(frozen=True)
class TaskResults:
    """The figures of tasks, and what they mean."""

    figures: tuple[TaskFigure, ...]
    definitions: tuple[Definition, ...]
    truncated: int
    """Requests whose context lost its beginning, because the model reads no more."""


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents."""

    config: TaskConfig
    tasks: Mapping[str, Any]
    """All tasks by name, those of groups too."""
    groups: Mapping[str, Any]
    """The groups by name."""


def load_tasks(config: TaskConfig) -> LoadedTasks:
    """The tasks of these names, with their documents, which may be on the hub.

    The harness's own tasks, of which there are thousands, are looked at only if they are needed.
    """
    names = [name for each in config.tasks for name in each.split(",") if name]
    if not names:
        raise ValueError("there is no task: name some, as in --tasks arc_easy,hellaswag")
    with _quiet_harness(), hub_session("tasks") as online:
        manager = TaskManager(include_path=config.include_path, include_defaults=False)
        if not all(_is_known(manager, name) for name in names):
            manager = TaskManager(include_path=config.include_path)
        for name in names:
            if not _is_known(manager, name):
                hint = suggest(name, manager.all_tasks) or "; `lm_eval ls tasks` lists all"
                raise ValueError(f"there is no task {name!r}{hint}")
        tasks: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        for name in names:
            try:
                loaded = manager.load([name])
            except Exception as error:  # datasets and the harness raise many types
                why = first_line(error) if online else f"{UNREACHABLE_MESSAGE} ({first_line(error)})"
                raise ValueError(f"the task {name} cannot be loaded: {why}") from None
            tasks |= loaded["tasks"]
            groups |= loaded["groups"]
    for task in tasks.values():
        _configure(task, config)
    return LoadedTasks(config, tasks, groups)


def _configure(task: Any, config: TaskConfig) -> None:
    """Set the examples before a question; a task that allows none keeps it that way, as in the harness."""
    default = task.get_config("num_fewshot")
    if default != 0:
        task.set_config(key="num_fewshot", value=(default or 0) if config.num_fewshot is None else config.num_fewshot)
    task.set_fewshot_seed(seed=config.seed)


def evaluate_tasks(model: HarnessModel, loaded: LoadedTasks) -> TaskResults:
    """The figures of all tasks."""
    config = loaded.config
    with _quiet_harness():
        results = evaluate(
            lm=model,
            task_dict={"tasks": dict(loaded.tasks), "groups": dict(loaded.groups)},
            limit=config.limit,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.apply_chat_template,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            bootstrap_iters=_BOOTSTRAP_ITERATIONS,
        )
    figures = [figure for name, task in loaded.tasks.items() for figure in _figures(name, task, results, model)]
    figures += _group_figures(results, figures)
    used = {each.name: each for each in model.record.definitions.values()}
    return TaskResults(tuple(figures), tuple(used.values()), model.record.truncated)


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Without its log, its messages on stdout, and its processes: what is printed here is one table."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with silenced_loggers("lm_eval", *_child_loggers()), redirect_stdout(io.StringIO()):
            yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


def _child_loggers() -> list[str]:
    return [name for name in logging.root.manager.loggerDict if name.startswith("lm_eval.")]


def _is_known(manager: TaskManager, name: str) -> bool:
    return name in manager.task_index or (name.endswith(".yaml") and Path(name).is_file())


def _figures(name: str, task: Any, results: Mapping[str, Any], model: HarnessModel) -> Iterator[TaskFigure]:
    kind = "loglikelihood" if task.OUTPUT_TYPE == "multiple_choice" else task.OUTPUT_TYPE
    definition = model.record.definitions[name if kind == "generate_until" else kind].name
    usage = model.record.usage.get(name)
    samples, aggregation = results["samples"][name], task.aggregation()
    drawn = {} if kind == "generate_until" else _monte_carlo_errors(task, samples, model.record.variances)
    for key, value in _metrics(results["results"][name]):
        metric, _, filter_name = key.partition(",")
        values = [row[metric] for row in samples if row["filter"] == filter_name and metric in row]
        error = results["results"][name].get(f"{metric}_stderr,{filter_name}")
        yield TaskFigure(
            task=name,
            metric=metric,
            filter=filter_name,
            value=float(value),
            standard_error=float(error) if isinstance(error, int | float) else _error(aggregation[metric], values),
            monte_carlo_error=drawn.get(key),
            documents=len(values),
            num_fewshot=results["n-shot"].get(name),
            definition=definition,
            tokens_per_call=None if usage is None else usage.tokens_per_call,
            version=str(results["versions"].get(name)),
        )


def _group_figures(results: Mapping[str, Any], figures: Sequence[TaskFigure]) -> Iterator[TaskFigure]:
    """The means over groups, as the harness has them."""
    for name, metrics in results.get("groups", {}).items():
        members = [figure for figure in figures if figure.task in results["group_subtasks"].get(name, ())]
        for key, value in _metrics(metrics):
            metric, _, filter_name = key.partition(",")
            error = metrics.get(f"{metric}_stderr,{filter_name}")
            kinds = {figure.definition for figure in members or figures if figure.metric == metric}
            yield TaskFigure(
                task=name,
                metric=metric,
                filter=filter_name,
                value=float(value),
                standard_error=float(error) if isinstance(error, int | float) else None,
                monte_carlo_error=None,
                documents=metrics.get("sample_len", 0),
                num_fewshot=results["n-shot"].get(name),
                definition=kinds.pop() if len(kinds) == 1 else "several",
                tokens_per_call=None,
                version=str(results["versions"].get(name)),
            )


def _metrics(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The metrics of a task by METRIC,FILTER, without their errors."""
    return [
        (key, value)
        for key, value in found.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    ]


def _error(aggregate: Callable[[Sequence[Any]], float], values: Sequence[Any]) -> float | None:
    """The standard error of an aggregate over documents: its spread if they are drawn again with replacement."""
    if len(values) < 2:
        return None
    generator = np.random.default_rng(0)
    again = [
        aggregate([values[i] for i in generator.integers(len(values), size=len(values))]) for _ in range(_RESAMPLES)
    ]
    return _spread(again)


def _monte_carlo_errors(
    task: Any, rows: Sequence[Mapping[str, Any]], variances: Mapping[tuple[str, ...], float]
) -> dict[str, float]:
    """The spread of each METRIC,FILTER if every likelihood is drawn again with its own error."""
    errors = [[math.sqrt(variances[tuple(args)]) for args in row["arguments"]] for row in rows]
    is_drawn, generator, aggregation = any(map(any, errors)), np.random.default_rng(0), task.aggregation()
    again: dict[str, list[float]] = defaultdict(list)
    for _ in range(_RESAMPLES if is_drawn else 2):
        values: dict[str, list[Any]] = defaultdict(list)
        for row, deviations in zip(rows, errors, strict=True):
            noise = (generator.standard_normal(len(deviations)) * deviations).tolist()
            drawn = [_shifted(each, shift) for each, shift in zip(row["filtered_resps"], noise, strict=True)]
            for metric, value in task.process_results(row["doc"], drawn).items():
                values[f"{metric},{row['filter']}"].append(value)
        for key, each in values.items():
            again[key].append(aggregation[key.partition(",")[0]](each))
    return {key: _spread(each) for key, each in again.items()}


def _shifted(response: Any, shift: float) -> Any:
    """A response of `loglikelihood`, a pair, or of `loglikelihood_rolling`, a number, with another likelihood."""
    return response + shift if isinstance(response, float) else (response[0] + shift, *response[1:])


def _spread(values: Sequence[float]) -> float:
    found = np.asarray(values, dtype=np.float64)
    return 0.0 if np.ptp(found) == 0 else float(found.std(ddof=1))
