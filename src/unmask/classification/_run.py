"""A classification experiment carried out in a folder: train or resume, choose the epoch, test, save.

The folder is that of any run (`unmask.training.run_folder`): experiment.json, checkpoints, metrics.jsonl, model/;
beside them are best.safetensors, the weights of the best epoch, and results.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unmask.classification._classifier import Classifier
from unmask.classification._experiment import ClassificationExperiment, LoadedData, load_data
from unmask.classification._folder import save_classifier
from unmask.classification._metrics import Evaluation, Metric, Summary, summarize
from unmask.classification._training import BestEpoch, build_classifier, build_trainer
from unmask.distributed import Distributed
from unmask.io.atomic import write_json
from unmask.io.untrusted import read_json_object
from unmask.model import LanguageModel
from unmask.pretrained import load
from unmask.provenance import collect_provenance
from unmask.registry import AllowCode
from unmask.training.logger import TrainingLogger
from unmask.training.loop import train as run_training_loop
from unmask.training.lora import merge_lora
from unmask.training.run_folder import RunFolder, diff_settings
from unmask.training.trainer import Trainer

RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class RunResult:
    """What a finished run has found."""

    seed: int
    epochs: tuple[dict[str, float | None], ...]
    """The figures of the validation rows after each epoch."""
    best_epoch: int | None
    """The epoch whose weights were tested, from 1; None: the last one."""
    evaluations: dict[str, Evaluation]
    """The figures of each test set."""
    rows: dict[str, int]
    """How many rows there were."""
    cut: dict[str, int]
    """How many of them were cut because they were too long."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        evaluations = {name: each.to_json() for name, each in self.evaluations.items()}
        return {**asdict(self), "epochs": list(self.epochs), "evaluations": evaluations}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunResult:
        """The inverse of `to_json`."""
        evaluations = {name: _read_evaluation(each) for name, each in data["evaluations"].items()}
        fields = {name: data[name] for name in ("seed", "best_epoch", "rows", "cut")}
        return cls(epochs=tuple(data["epochs"]), evaluations=evaluations, **fields)


def run_classification(
    experiment: ClassificationExperiment,
    folder: Path,
    distributed: Distributed = Distributed(),  # noqa: B008
    *,
    init_model: LanguageModel | None = None,
    restart: bool = False,
    allow_code: AllowCode = False,
) -> RunResult | None:
    """Train (or resume), test and save a classifier; None if a signal stopped it. A finished run is only read.

    `init_model`: the model of `init_from`, if it is loaded already. `restart`: begin anew; what was there is kept
    in another folder.
    """
    data = load_data(experiment.data, experiment.training.seed)
    run = RunFolder(folder, distributed, allow_code=allow_code)
    with run.claim():
        _check_same_experiment(run, experiment, data)
        finished = _read_result(run) if not restart else None
        distributed.barrier()
        if finished is not None:
            return finished
        init_model = init_model or load_encoder(experiment.init_from, allow_code)
        classifier = build_classifier(experiment, data, init_model, distributed)
        trainer, best, cut = build_trainer(experiment, data, classifier, folder)
        if distributed.is_main and run.read_experiment() is None:
            run.write_experiment(experiment.fixed_settings(), data.digest, [])
        distributed.barrier()
        messages = [*_describe_data(data, classifier, cut), *run.resume(trainer, restart)]
        if not _train(trainer, best, run, messages):
            return None
        result = _finish(experiment, data, classifier, trainer, best, run, cut)
        distributed.barrier()
    return result


def load_encoder(folder: str, allow_code: AllowCode = False) -> LanguageModel:
    """A model to make a classifier of: any that `unmask.load` reads, also encoders without a head."""
    return load(folder, require_head=False, allow_code=allow_code, dtype="float32")


def _check_same_experiment(run: RunFolder, experiment: ClassificationExperiment, data: LoadedData) -> None:
    stored = run.read_experiment() if run.distributed.is_main else None
    if stored is None:
        return
    changes = diff_settings(run.read_settings(), experiment.fixed_settings())
    if not changes and stored["corpus_sha256"] != data.digest:
        changes = ["the labelled rows are not those that it began with"]
    run.raise_if_changed(changes)


def _describe_data(data: LoadedData, classifier: Classifier, cut: Mapping[str, int]) -> list[str]:
    valid = "" if data.valid is None else f", {len(data.valid):,} to choose the epoch by"
    lines = [f"{len(data.train):,} training rows{valid}; {classifier!r}"]
    for name, count in cut.items():
        if count:
            lines.append(f"{count:,} rows of {name} are longer than {classifier.config.max_length} tokens, and are cut")
    for name, table in data.tests.items():
        if not data.labels.is_number:
            seen = {data.labels.names[int(target)] for target in data.targets(table)}
            missing = [label for label in data.labels.names if label not in seen]
            if missing:
                lines.append(f"no row of {name} has the label {', '.join(missing)}, which the training rows have")
    return lines


def _train(trainer: Trainer, best: BestEpoch | None, run: RunFolder, messages: list[str]) -> bool:
    quiet, config = not run.distributed.is_main, trainer.config
    log = TrainingLogger(run.path, config.steps, trainer.state.step, quiet, config.trackers, unit="rows")
    with log:
        for message in messages:
            log.info(message)
        evaluate = None if best is None else lambda: dict(best.last)
        return run_training_loop(trainer, run.checkpoints, log, evaluate)


def _finish(
    experiment: ClassificationExperiment,
    data: LoadedData,
    classifier: Classifier,
    trainer: Trainer,
    best: BestEpoch | None,
    run: RunFolder,
    cut: Mapping[str, int],
) -> RunResult:
    """Take the best epoch, test it once, and write model/ and results.json."""
    if best is not None:
        best.load_best(trainer)
    if experiment.lora is not None:
        merge_lora(trainer.model)
    trainer.model.eval()
    encoded = {name: classifier.encoder.encode(table.texts, experiment.too_long) for name, table in data.tests.items()}
    evaluations = {name: classifier.evaluate_rows(rows, data.tests[name]) for name, rows in encoded.items()}
    tables = {"train": data.train, **({} if data.valid is None else {"valid": data.valid}), **data.tests}
    history = [] if best is None else best.state_dict()["history"]
    result = RunResult(
        seed=experiment.training.seed,
        epochs=tuple(history),
        best_epoch=None if best is None else best.best,
        evaluations=evaluations,
        rows={name: len(table) for name, table in tables.items()},
        cut={**cut, **{name: rows.num_cut for name, rows in encoded.items()}},
    )
    if run.distributed.is_main:
        save_classifier(
            classifier, run.model, overwrite=True, facts=_facts(experiment, data), results=_flat(evaluations)
        )
        write_json(run.path / RESULTS_FILE, {**result.to_json(), "provenance": _provenance(experiment, data)})
    return result


def _flat(evaluations: Mapping[str, Evaluation]) -> dict[str, Metric]:
    return {f"{name} of {test}": metric for test, each in evaluations.items() for name, metric in each.metrics.items()}


def _facts(experiment: ClassificationExperiment, data: LoadedData) -> dict[str, str]:
    training = experiment.training
    return {
        "started from": experiment.init_from,
        "training rows": f"{len(data.train):,}",
        "rows (SHA-256)": data.digest,
        "epochs": f"{experiment.epochs} of batches of {training.batch_size}",
        "seed": str(training.seed),
    }


def _provenance(experiment: ClassificationExperiment, data: LoadedData) -> dict[str, object]:
    return collect_provenance(experiment.training.seed, {"rows (SHA-256)": data.digest})


def _read_result(run: RunFolder) -> RunResult | None:
    file = run.path / RESULTS_FILE
    if not file.exists() or not run.model.is_dir():
        return None
    try:
        return RunResult.from_json(read_json_object(file))
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is damaged: give --restart to train again") from None


def _read_evaluation(data: Mapping[str, Any]) -> Evaluation:
    metrics = {name: Metric(**metric) for name, metric in data["metrics"].items()}
    return Evaluation(data["rows"], metrics, tuple(tuple(line) for line in data["confusion"]))


@dataclass(frozen=True)
class Results:
    """Several runs of one experiment: seeds or folds."""

    runs: dict[str, RunResult]

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Mean, range and standard error of each figure of each test set, over the runs that have it."""
        found: dict[str, dict[str, list[float]]] = {}
        for run in self.runs.values():
            for test, evaluation in run.evaluations.items():
                for name, metric in evaluation.metrics.items():
                    if metric.value is not None:
                        found.setdefault(test, {}).setdefault(name, []).append(metric.value)
        return {test: {name: summarize(values) for name, values in figures.items()} for test, figures in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        summaries = {
            test: {name: asdict(summary) for name, summary in figures.items()}
            for test, figures in self.summaries().items()
        }
        return {"summaries": summaries, "runs": {name: run.to_json() for name, run in self.runs.items()}}


def run_many(
    experiments: Mapping[str, ClassificationExperiment],
    folder: Path,
    distributed: Distributed = Distributed(),  # noqa: B008
    *,
    restart: bool = False,
    allow_code: AllowCode = False,
    on_start: Callable[[str], None] = lambda _: None,
) -> Results | None:
    """Carry out experiments one after the other; None if a signal stopped one of them.

    One experiment is run in the folder itself, several in folders of their names in it.
    """
    runs: dict[str, RunResult] = {}
    for name, experiment in experiments.items():
        on_start(name)
        path = folder if len(experiments) == 1 else folder / name
        result = run_classification(experiment, path, distributed, restart=restart, allow_code=allow_code)
        if result is None:
            return None
        runs[name] = result
    results = Results(runs)
    if distributed.is_main and len(experiments) > 1:
        first = next(iter(experiments.values()))
        provenance = collect_provenance(first.training.seed, {})
        write_json(folder / RESULTS_FILE, {**results.to_json(), "provenance": provenance})
    return results
