"""All that a report says, gathered before anything is drawn: `report.json` is this and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from unmask.config import from_json
from unmask.data.corpus import Corpus
from unmask.experiment import Experiment, averaged_model
from unmask.measurement import Effort, evaluate, rows_of
from unmask.model import LanguageModel
from unmask.provenance import made_by
from unmask.release import load
from unmask.report.history import Curves, Judged, read_curves, read_judged, read_settings
from unmask.report.measures import HELD_OUT, Bound, no_step_bounds, step_bounds
from unmask.report.samples import Sample, draw_samples
from unmask.training import checkpoint

SWEEP = tuple(2**k for k in range(10))
"""The numbers of steps whose bounds are compared."""


@dataclass(frozen=True)
class ReportSettings:
    """How much work a report is.

    `rows` held-out windows are scored `replicates` times for the headline; the bounds of T-step samplers
    are taken on `sweep_rows` windows, `sweep_replicates` times each. `samples` texts are written
    in `steps` steps.
    """

    rows: int = 80
    replicates: int = 4
    sweep_rows: int = 16
    sweep_replicates: int = 8
    samples: int = 4
    steps: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("sweep_rows", 1), ("samples", 1), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("replicates", "sweep_replicates"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, so that an error can be told")


@dataclass(frozen=True)
class Status:
    """How far the run is, and which step's averaged weights were measured."""

    finished: bool
    step: int
    steps: int
    measured_step: int

    @property
    def sentence(self) -> str:
        """For people."""
        if self.finished:
            return f"Finished: all {self.steps:,} steps are done."
        return (
            f"Not finished: it is still going or was stopped, at step {self.step:,} of {self.steps:,}."
            f" Everything measured here is of the checkpoint of step {self.measured_step:,}."
        )


@dataclass(frozen=True)
class Contents:
    """A report. `held_out` are the figures of a `Score`, None if the run has no held-out text."""

    name: str
    status: Status
    objective: str
    parameters: int
    curves: Curves
    held_out: dict[str, Any] | None
    step_bounds: tuple[Bound, ...]
    no_step_bounds: str | None
    judged: tuple[Judged, ...]
    sampler: str
    samples: tuple[Sample, ...]
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def curriculum_ends(self) -> int | None:
        """The step from which the training loss estimates the bound, if it did not from the start."""
        training = self.settings.get("training") or {}
        curriculum = training.get("curriculum")
        return None if curriculum is None else round(training["steps"] * curriculum.get("until", 1.0))

    @property
    def headline(self) -> dict[str, float | None]:
        """The figures at the top, with the errors of those that are estimates."""
        names = ("bits_per_byte", "nats_per_token", "perplexity")
        found = self.held_out or {}
        errors = ("bits_per_byte_error", "standard_error", "perplexity_error")
        seconds = self.curves.seconds
        return {
            **{name: found.get(name) for name in (*names, *errors)},
            "parameters": self.parameters,
            "tokens_seen": self.curves.tokens_seen,
            "training_seconds": seconds,
            "tokens_per_second": self.curves.tokens_seen / seconds if seconds else None,
            "steps_skipped": self.curves.skipped,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data for programs; what is not finite is null."""
        data = asdict(self)
        for sample, plain in zip(self.samples, data["samples"], strict=True):
            plain["text"] = sample.text
        found: dict[str, Any] = _plain({"name": self.name, "headline": self.headline, **data})
        return found


Progress: TypeAlias = Callable[[str, int | None, str], AbstractContextManager[Callable[[int], None]]]
"""While something is done: what, how much there is of it, in which unit; gives a function to tell how far."""


@contextmanager
def silent(_what: str, _total: int | None, _unit: str) -> Iterator[Callable[[int], None]]:
    """Nobody is told."""
    yield lambda _done: None


def gather(run: Path, settings: ReportSettings, progress: Progress = silent) -> Contents:
    """Read the run's folder and measure its model, the newest there is."""
    stated = read_settings(run)
    experiment: Experiment = from_json(
        Experiment, {key: value for key, value in stated.items() if key != "corpus"}, str(run)
    )
    curves, judged = read_curves(run), read_judged(run)
    corpus = Corpus.open(run / "corpus", verify=False)
    if HELD_OUT in corpus.splits:
        corpus.verify(HELD_OUT)
    lm, status = _model(run, experiment, curves)
    seed, layout = settings.seed, experiment.layout
    held_out, why_not = None, no_step_bounds(lm.objective)
    bounds: tuple[Bound, ...] = ()
    if HELD_OUT in corpus.splits:
        effort = Effort(settings.rows, settings.replicates, seed=seed)
        with progress("held-out text", rows_of(corpus, layout, effort), "rows") as report:
            held_out = evaluate(lm, corpus, HELD_OUT, layout, effort, report).figures()
        sweep = (settings.sweep_rows, settings.sweep_replicates, seed)
        with progress("bounds by steps", len(SWEEP) + 1, "bounds") as report:
            bounds = step_bounds(lm, corpus, layout, SWEEP, *sweep, report)
    else:
        why_not = why_not or "No text was held out, so nothing can be measured on it."
    with progress("samples", settings.steps, "steps") as report:
        samples = draw_samples(lm, corpus.tokenizer, settings.samples, settings.steps, seed, report)
    return Contents(
        name=run.resolve().name,
        status=status,
        objective=type(lm.objective).__name__,
        parameters=sum(parameter.numel() for parameter in lm.denoise.parameters()),
        curves=curves,
        held_out=held_out,
        step_bounds=bounds,
        no_step_bounds=why_not,
        judged=judged,
        sampler=type(lm.default_sampler(settings.steps)).__name__,
        samples=tuple(samples),
        settings=stated,
        provenance={
            **made_by(seed, {"corpus (SHA-256)": corpus.digest}),
            "seed of training": experiment.training.seed,
            "report": asdict(settings),
        },
    )


def _model(run: Path, experiment: Experiment, curves: Curves) -> tuple[LanguageModel, Status]:
    """The finished model, or that of the newest checkpoint."""
    steps = experiment.training.steps
    if (run / "model").is_dir():
        return load(run / "model"), Status(True, steps, steps, steps)
    lm, _ = averaged_model(run)
    newest, _ = checkpoint.newest(run)
    measured = int(newest.name.removeprefix("step-")) if newest is not None else 0
    return lm, Status(False, max(measured, *curves.step[-1:], 0), steps, measured)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
