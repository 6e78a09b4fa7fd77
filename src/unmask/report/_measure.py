"""The data of a report, collected before anything is plotted: `report.json` holds all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from unmask.config import from_json
from unmask.data.corpus import Corpus
from unmask.data.loader import Loader, RowLayout
from unmask.evaluation.evaluate import evaluate_corpus, num_windows
from unmask.experiment import Experiment
from unmask.likelihood.corpus import EvalConfig
from unmask.likelihood.step_bounds import StepBound, step_bounds, why_no_step_bounds
from unmask.model import LanguageModel
from unmask.pretrained import load
from unmask.provenance import collect_provenance
from unmask.registry import AllowCode
from unmask.report._run_log import Curves, SampleEval, read_curves, read_sample_evals
from unmask.report._samples import RevealedSample, generate_samples
from unmask.report.config import ReportConfig
from unmask.run import load_ema_model
from unmask.sampling.factory import default_sampler
from unmask.training.run_folder import RunFolder
from unmask.types import ProgressFn

_STEP_COUNTS = tuple(2**k for k in range(10))
"""The numbers of steps whose bounds are compared."""
_VALID_SPLIT = "valid"


@dataclass(frozen=True)
class RunStatus:
    """How far the run has come."""

    finished: bool
    step: int
    """The last step that was logged."""
    steps: int
    """The steps of the whole run."""
    checkpoint_step: int
    """The step whose averaged weights were measured."""

    @property
    def sentence(self) -> str:
        """The status in words."""
        if self.finished:
            return f"Finished: all {self.steps:,} steps are done."
        return (
            f"Not finished: still running or stopped at step {self.step:,} of {self.steps:,}."
            f" All measurements are of the checkpoint of step {self.checkpoint_step:,}."
        )


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows."""

    name: str
    status: RunStatus
    objective: str
    bound: str
    """The objective whose bound is that of the model: the same, unless the training loss is none, as that of MLM."""
    network: dict[str, Any]
    """What the backbone's `describe` gives."""
    learned: dict[str, str]
    """What the objective has learned beside the network, such as which tokens are revealed first."""
    num_parameters: int
    curves: Curves
    validation: dict[str, Any] | None
    """The `Score` of the validation split as a dictionary; None if no text was held out."""
    step_bounds: tuple[StepBound, ...]
    why_no_step_bounds: str | None
    sample_evals: tuple[SampleEval, ...]
    sampler: str
    samples: tuple[RevealedSample, ...]
    settings: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def loss_note(self) -> str:
        """What the training loss is, where it does not estimate the bound."""
        if self.settings.get("distillation") is not None:
            return f" The training loss is that of the distillation; held-out nats are {self.bound}'s."
        return (
            "" if self.bound == self.objective else f" The training loss is no bound; held-out nats are {self.bound}'s."
        )

    @property
    def curriculum_end_step(self) -> int | None:
        """The step from which the training loss estimates the bound, if it did not from the start."""
        training = self.settings.get("training") or {}
        curriculum = training.get("curriculum")
        return None if curriculum is None else round(training["steps"] * curriculum.get("end_fraction", 1.0))

    @property
    def headline(self) -> dict[str, float | None]:
        """The numbers at the top of the page, and the standard errors of the estimates."""
        names = ("bits_per_byte", "nats_per_token", "perplexity")
        validation = self.validation or {}
        errors = ("bits_per_byte_error", "standard_error", "perplexity_error")
        seconds = self.curves.seconds
        return {
            **{name: validation.get(name) for name in (*names, *errors)},
            "parameters": self.num_parameters,
            "tokens_seen": self.curves.tokens_seen,
            "training_seconds": seconds,
            "tokens_per_second": self.curves.tokens_seen / seconds if seconds else None,
            "steps_skipped": self.curves.num_skipped,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become null."""
        data = asdict(self)
        for sample, plain in zip(self.samples, data["samples"], strict=True):
            plain["text"] = sample.text
        safe: dict[str, Any] = _json_safe({"name": self.name, "headline": self.headline, **data})
        return safe


ProgressContext: TypeAlias = Callable[[str, int | None, str], AbstractContextManager[ProgressFn]]
"""Shows the progress of one part of the work: its title, its total (None if unknown) and the unit of that."""


@contextmanager
def no_progress(_title: str, _total: int | None, _unit: str) -> Iterator[ProgressFn]:
    """Shows nothing."""
    yield lambda _done: None


def measure_run(
    run: Path, config: ReportConfig, progress: ProgressContext = no_progress, *, allow_code: AllowCode = False
) -> ReportData:
    """Read the run's folder, and measure its model or that of its latest checkpoint."""
    settings = RunFolder(run).read_settings()
    experiment: Experiment = from_json(Experiment, settings, str(run), allow_code=allow_code)
    curves = read_curves(run)
    corpus = Corpus.open(run / "corpus", verify=False, allow_code=allow_code)
    lm, status = _load_model(run, experiment, curves, allow_code)
    validation, bounds, why_no_bounds = _evaluate(lm, corpus, experiment.layout, config, progress)
    with progress("samples", config.steps, "steps") as report:
        samples = generate_samples(lm, corpus.tokenizer, config.samples, config.steps, config.seed, report)
    return ReportData(
        name=run.resolve().name,
        status=status,
        objective=type(lm.objective).__name__,
        bound=type(lm.objective.bound).__name__,
        network=lm.denoiser.backbone.describe(),
        learned=lm.describe_learned(),
        num_parameters=sum(parameter.numel() for parameter in lm.denoiser.parameters()),
        curves=curves,
        validation=validation,
        step_bounds=bounds,
        why_no_step_bounds=why_no_bounds,
        sample_evals=read_sample_evals(run),
        sampler=type(default_sampler(lm.denoiser, config.steps)).__name__,
        samples=tuple(samples),
        settings=settings,
        provenance={
            **collect_provenance(config.seed, {"corpus (SHA-256)": corpus.digest}),
            "seed of training": experiment.training.seed,
            "report": asdict(config),
        },
    )


def _evaluate(
    lm: LanguageModel, corpus: Corpus, layout: RowLayout, config: ReportConfig, progress: ProgressContext
) -> tuple[dict[str, Any] | None, tuple[StepBound, ...], str | None]:
    """The score of the validation split and its bounds in T steps; why those are missing, if they are."""
    if _VALID_SPLIT not in corpus.splits:
        return None, (), "No text was held out, so there is no likelihood."
    if lm.objective.why_no_likelihood is not None:
        return None, (), lm.objective.why_no_likelihood
    corpus.verify(_VALID_SPLIT)
    headline = EvalConfig(config.windows, config.replicates, seed=config.seed)
    with progress("held-out text", num_windows(corpus, layout, headline), "windows") as report:
        score = evaluate_corpus(lm, corpus, _VALID_SPLIT, layout, headline, report)
    sweep = EvalConfig(config.sweep_windows, config.sweep_replicates, seed=config.seed)
    loader = Loader(corpus.splits[_VALID_SPLIT], layout, batch_size=config.sweep_windows)
    with progress("bounds by steps", len(_STEP_COUNTS) + 1, "bounds") as report, lm.inference_mode():
        bounds = step_bounds(lm.denoiser, lm.objective, loader, _STEP_COUNTS, sweep, report)
    return score.to_dict(), bounds, why_no_step_bounds(lm.objective)


def _load_model(
    run: Path, experiment: Experiment, curves: Curves, allow_code: AllowCode
) -> tuple[LanguageModel, RunStatus]:
    """The finished model, or the averaged weights of the latest checkpoint."""
    steps = experiment.training.steps
    folder = RunFolder(run)
    if folder.is_finished(steps):
        return load(folder.model, allow_code=allow_code), RunStatus(True, steps, steps, steps)
    lm, _ = load_ema_model(run, allow_code=allow_code)
    measured = folder.checkpoints.latest()[0] or 0
    return lm, RunStatus(False, max(measured, *curves.step[-1:], 0), steps, measured)


def _json_safe(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
