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
from unmask.evaluation.evaluate import evaluate_corpus, num_windows
from unmask.experiment import Experiment
from unmask.likelihood.corpus import EvalConfig
from unmask.model import LanguageModel
from unmask.pretrained import load
from unmask.provenance import collect_provenance
from unmask.report.run_log import Curves, SampleEval, read_curves, read_sample_evals
from unmask.report.samples import RevealedSample, generate_samples
from unmask.report.step_bounds import VALID_SPLIT, StepBound, step_bounds, why_no_step_bounds
from unmask.run import load_ema_model
from unmask.training.run_folder import RunFolder

_STEP_COUNTS = tuple(2**k for k in range(10))
"""The numbers of steps whose bounds are compared."""


@dataclass(frozen=True)
class ReportConfig:
    """How much work a report is.

    `rows` held-out windows are scored `replicates` times for the headline; the bounds of T-step samplers
    are taken on `sweep_rows` windows, `sweep_replicates` times each. `samples` texts are written
    in `steps` steps.
    """

    windows: int = 80
    replicates: int = 4
    sweep_windows: int = 16
    sweep_replicates: int = 8
    samples: int = 4
    steps: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("sweep_windows", 1), ("samples", 1), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("replicates", "sweep_replicates"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, so that an error can be told")


@dataclass(frozen=True)
class RunStatus:
    """How far the run is, and which step's averaged weights were measured."""

    finished: bool
    step: int
    steps: int
    checkpoint_step: int

    @property
    def sentence(self) -> str:
        """For people."""
        if self.finished:
            return f"Finished: all {self.steps:,} steps are done."
        return (
            f"Not finished: it is still going or was stopped, at step {self.step:,} of {self.steps:,}."
            f" Everything measured here is of the checkpoint of step {self.checkpoint_step:,}."
        )


@dataclass(frozen=True)
class ReportData:
    """A report. `held_out` are the figures of a `Score`, None if the run has no held-out text."""

    name: str
    status: RunStatus
    objective: str
    num_parameters: int
    curves: Curves
    validation: dict[str, Any] | None
    step_bounds: tuple[StepBound, ...]
    why_no_step_bounds: str | None
    sample_evals: tuple[SampleEval, ...]
    sampler: str
    samples: tuple[RevealedSample, ...]
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def curriculum_end_step(self) -> int | None:
        """The step from which the training loss estimates the bound, if it did not from the start."""
        training = self.settings.get("training") or {}
        curriculum = training.get("curriculum")
        return None if curriculum is None else round(training["steps"] * curriculum.get("end_fraction", 1.0))

    @property
    def headline(self) -> dict[str, float | None]:
        """The figures at the top, with the errors of those that are estimates."""
        names = ("bits_per_byte", "nats_per_token", "perplexity")
        found = self.validation or {}
        errors = ("bits_per_byte_error", "standard_error", "perplexity_error")
        seconds = self.curves.seconds
        return {
            **{name: found.get(name) for name in (*names, *errors)},
            "parameters": self.num_parameters,
            "tokens_seen": self.curves.tokens_seen,
            "training_seconds": seconds,
            "tokens_per_second": self.curves.tokens_seen / seconds if seconds else None,
            "steps_skipped": self.curves.num_skipped,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data for programs; what is not finite is null."""
        data = asdict(self)
        for sample, plain in zip(self.samples, data["samples"], strict=True):
            plain["text"] = sample.text
        found: dict[str, Any] = _json_safe({"name": self.name, "headline": self.headline, **data})
        return found


ProgressContext: TypeAlias = Callable[[str, int | None, str], AbstractContextManager[Callable[[int], None]]]
"""While something is done: what, how much there is of it, in which unit; gives a function to tell how far."""


@contextmanager
def no_progress(_what: str, _total: int | None, _unit: str) -> Iterator[Callable[[int], None]]:
    """Nobody is told."""
    yield lambda _done: None


def collect(run: Path, config: ReportConfig, progress: ProgressContext = no_progress) -> ReportData:
    """Read the run's folder and measure its model, the newest there is."""
    stated = RunFolder(run).read_settings()
    experiment: Experiment = from_json(Experiment, stated, str(run))
    curves, judged = read_curves(run), read_sample_evals(run)
    corpus = Corpus.open(run / "corpus", verify=False)
    if VALID_SPLIT in corpus.splits:
        corpus.verify(VALID_SPLIT)
    lm, status = _load_model(run, experiment, curves)
    seed, layout = config.seed, experiment.layout
    held_out, why_not = None, why_no_step_bounds(lm.objective)
    bounds: tuple[StepBound, ...] = ()
    if VALID_SPLIT in corpus.splits:
        effort = EvalConfig(config.windows, config.replicates, seed=seed)
        with progress("held-out text", num_windows(corpus, layout, effort), "windows") as report:
            held_out = evaluate_corpus(lm, corpus, VALID_SPLIT, layout, effort, report).to_dict()
        sweep = (config.sweep_windows, config.sweep_replicates, seed)
        with progress("bounds by steps", len(_STEP_COUNTS) + 1, "bounds") as report:
            bounds = step_bounds(lm, corpus, layout, _STEP_COUNTS, *sweep, report)
    else:
        why_not = why_not or "No text was held out, so nothing can be measured on it."
    with progress("samples", config.steps, "steps") as report:
        samples = generate_samples(lm, corpus.tokenizer, config.samples, config.steps, seed, report)
    return ReportData(
        name=run.resolve().name,
        status=status,
        objective=type(lm.objective).__name__,
        num_parameters=sum(parameter.numel() for parameter in lm.denoiser.parameters()),
        curves=curves,
        validation=held_out,
        step_bounds=bounds,
        why_no_step_bounds=why_not,
        sample_evals=judged,
        sampler=type(lm.default_sampler(config.steps)).__name__,
        samples=tuple(samples),
        settings=stated,
        provenance={
            **collect_provenance(seed, {"corpus (SHA-256)": corpus.digest}),
            "seed of training": experiment.training.seed,
            "report": asdict(config),
        },
    )


def _load_model(run: Path, experiment: Experiment, curves: Curves) -> tuple[LanguageModel, RunStatus]:
    """The finished model, or that of the newest checkpoint."""
    steps = experiment.training.steps
    folder = RunFolder(run)
    if folder.is_finished(steps):
        return load(folder.model), RunStatus(True, steps, steps, steps)
    lm, _ = load_ema_model(run)
    measured = folder.checkpoints.latest()[0] or 0
    return lm, RunStatus(False, max(measured, *curves.step[-1:], 0), steps, measured)


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
