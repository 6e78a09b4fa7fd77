"""`unmask classify train`, `eval` and `predict`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unmask.cli._arguments import (
    AllowCodeFlag,
    JsonFlag,
    ModelPath,
    ResultsPath,
    allow_imports,
    model_fingerprint,
    print_json,
    validate_output,
    write_results,
)
from unmask.cli._signature import Option, Positional
from unmask.report.formatting import format_estimate, print_table

if TYPE_CHECKING:
    from unmask.classification import (
        ClassificationExperiment,
        Classifier,
        Evaluation,
        LabelledData,
        Metric,
        Protocol,
        Results,
        Table,
    )

_TaskName = Annotated[str | None, Option(metavar="NAME", completions="unmask.classification:TASKS")]
_FileArg = Annotated[Path, Positional()]
_FileArgs = Annotated[tuple[str, ...], Positional()]
_Overrides = Annotated[tuple[tuple[str, ...], ...], Option(name="set", metavar="FIELD=VALUE", repeated=True)]
_TextColumns = Annotated[tuple[str, ...], Option(metavar="COLUMN")]


def train(
    model: ModelPath,
    task: _TaskName = None,
    data: Path | None = None,
    train_on: Annotated[tuple[str, ...], Option(name="train", metavar="TABLE")] = (),
    valid: Annotated[tuple[str, ...], Option(metavar="TABLE")] = (),
    test: Annotated[tuple[str, ...], Option(metavar="TABLE")] = (),
    text: _TextColumns = (),
    label: str = "label",
    predict_what: Annotated[Literal["class", "number"], Option(name="predict")] = "class",
    out: Path = Path("runs/classifier"),
    seeds: int | None = None,
    folds: int | None = None,
    seed: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    max_length: int | None = None,
    too_long: Literal["cut", "refuse"] = "cut",
    pooling: Literal["first", "mean", "last"] | None = None,
    head_only: bool = False,
    lora_rank: int | None = None,
    validation_fraction: float | None = None,
    patience: int | None = None,
    metric: str | None = None,
    one_strand: bool = False,
    skip_empty: bool = False,
    overrides: _Overrides = (),
    restart: bool = False,
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Train a classifier on labelled texts, test it, and save it; resume it if it was interrupted.

    For example:
      unmask classify train runs/demo --train reviews.csv --test reviews.csv --epochs 1 --out runs/reviews
      unmask classify train runs/demo --train reviews.csv --folds 2 --epochs 1 --out runs/reviews-folds
      unmask classify train runs/demo --task sst2 --data glue/ --seeds 2 --epochs 1 --out runs/sst2

    A model of any kind that `unmask` loads gets a new head. A task by name has the protocol of the paper that
    reports it; all other options change it. Several seeds or folds give the mean, the range (max - min) and the
    standard error of the mean. Give the same command again to go on after an interruption.

    Args:
        model: The model to start from: a run, a folder (also an encoder of transformers) or a name on the hub.
        task: A labelled set by name: a task of GLUE (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte), a Genomic
            Benchmark (human_nontata_promoters, ...) or a task of GUE (tf_0, prom_core_all, ...).
        data: The folder with the files of named tasks; by default they come from the hub.
        train_on: Tables to train on (.csv, .tsv, .jsonl, .parquet), a folder with a folder of texts for each class, or
            hub:NAME:CONFIG:SPLIT.
        valid: Tables by which the best epoch is chosen.
        test: Tables that are tested once, at the end.
        text: The column of the text, or two columns for pairs; by default text, sentence, sequence or seq.
        label: The column of the label.
        predict_what: Whether labels are classes or numbers.
        out: The run's folder: checkpoints, metrics.jsonl, results.json and model/; several runs have folders in it.
        seeds: How many seeds to train with: of the head, the order of rows, dropout and the rows held out.
        folds: Divide the rows into so many parts, and test on each of them in turn.
        seed: The first seed.
        epochs: Passes over the training rows.
        batch_size: Rows of a step.
        lr: The peak learning rate.
        max_length: The most tokens of a row.
        too_long: Whether longer rows are cut (and counted) or refused.
        pooling: What the head reads: the first or last token, or the mean; by default as the network suggests.
        head_only: Train only the head.
        lora_rank: Train LoRA adapters of this rank, and the head.
        validation_fraction: The share of the training rows by which the best epoch is chosen.
        patience: End after so many epochs without a better one.
        metric: The figure that epochs are compared by: accuracy, f1, matthews, spearman or pearson.
        one_strand: Read DNA as it is, and not on both strands.
        skip_empty: Leave out rows without text.
        overrides: Any other setting, such as `training.optimizer.weight_decay=0.1`.
        restart: Begin anew; earlier checkpoints and metrics are kept in aside-1/.
    """
    from unmask.classification import OWN_DATA, find_task, make_experiment
    from unmask.config import override
    from unmask.training.lora import LoRA

    allow_imports(allow_code)
    protocol = OWN_DATA if task is None else find_task(task).protocol
    labelled = _labelled_data(
        task, data, {"train": train_on, "valid": valid, "test": test}, text, label, predict_what, folds
    )
    labelled = _with_options(labelled, validation_fraction=validation_fraction, skip_empty=skip_empty)
    given = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "max_length": max_length,
        "pooling": pooling,
        "seeds": None if seed is None else (seed,),
        "patience": patience,
        "metric": metric,
        "lora": None if lora_rank is None else LoRA(lora_rank),
        "reverse_complement": False if one_strand else None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    experiment = make_experiment(str(model), labelled, protocol, too_long=too_long, head_only=head_only, **changes)
    experiment = override(experiment, *(each for group in overrides for each in group), allow_code=True)
    runs = _plan_runs(experiment, protocol, seeds, seed, folds)
    _run(runs, out, protocol, task, restart, as_json, allow_code)


def evaluate(
    classifier: ModelPath,
    tables: _FileArgs = (),
    task: _TaskName = None,
    data: Path | None = None,
    text: _TextColumns = (),
    label: str = "label",
    too_long: Literal["cut", "refuse"] = "cut",
    skip_empty: bool = False,
    out: ResultsPath = None,
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Test a classifier on labelled texts: figures with 95 % confidence intervals, and the confusion matrix.

    For example:
      unmask classify eval runs/reviews reviews.csv
      unmask classify eval runs/reviews --task sst2 --data glue/

    The interval of the accuracy is Wilson's; those of F1, Matthews, Pearson and Spearman are percentiles of a
    bootstrap of 1,000 draws.

    Args:
        classifier: A classifier's folder, or the run that made it.
        tables: Labelled tables, or hub:NAME:CONFIG:SPLIT.
        task: A labelled set by name, instead: its test rows.
        data: The folder with the files of named tasks; by default they come from the hub.
        text: The column of the text, or two columns; by default those of the training rows.
        label: The column of the label.
        too_long: Whether rows of too many tokens are cut (and counted) or refused.
        skip_empty: Leave out rows without text.
    """
    from unmask.classification import find_task, load_classifier, read_table
    from unmask.cli._progress import progress

    validate_output(out)
    allow_imports(allow_code)
    if bool(tables) == (task is not None):
        raise ValueError("name either tables to test on, or a --task")
    model = load_classifier(classifier, allow_code=allow_code)
    if task is None:
        read = {name: _read(model, (name,), text, label, skip_empty) for name in tables}
    else:
        splits = find_task(task).splits(data)[2]
        read = {
            split.name: read_table(split.sources, split.columns, with_labels=True, skip_empty=skip_empty)
            for split in splits
        }
    found: dict[str, Evaluation] = {}
    for name, table in read.items():
        rows = model.encoder.encode(table.texts, too_long)
        _tell_cut(name, rows.num_cut, model)
        with progress(name, len(table), "rows", quiet=as_json) as report:
            found[name] = model.evaluate_rows(rows, table, report)
    results = {"evaluations": {name: each.to_json() for name, each in found.items()}}
    if not write_results(results, 0, {}, model_fingerprint(classifier), out, as_json):
        _print_evaluations(found)
        for each in found.values():
            _print_confusion(model.labels.names, each)


def predict(
    classifier: ModelPath,
    table: _FileArg,
    out: _FileArg,
    text: _TextColumns = (),
    too_long: Literal["cut", "refuse"] = "cut",
    allow_code: AllowCodeFlag = False,
) -> None:
    """Classify the texts of a table, and write a table with predictions and probabilities.

    For example:
      unmask classify predict runs/reviews reviews.csv predictions.csv
      unmask classify predict runs/reviews reviews.csv predictions.jsonl

    Args:
        classifier: A classifier's folder, or the run that made it.
        table: The texts: .csv, .tsv, .jsonl, .parquet.
        out: The file to write: .csv or .jsonl. It is replaced when all rows are done.
        text: The column of the text, or two columns; by default those of the training rows.
        too_long: Whether rows of too many tokens are cut (and counted) or refused.
    """
    from unmask.classification import check_output, load_classifier, write_predictions
    from unmask.cli._progress import progress

    check_output(out)
    allow_imports(allow_code)
    model = load_classifier(classifier, allow_code=allow_code)
    texts = _read(model, (str(table),), text, None)
    rows = model.encoder.encode(texts.texts, too_long)
    _tell_cut(str(table), rows.num_cut, model)
    with progress("predicting", len(texts), "rows") as report:
        logits = model.logits(rows, report)
    write_predictions(model, texts, logits, out)
    print(out)


def _labelled_data(
    task: str | None,
    folder: Path | None,
    tables: Mapping[str, tuple[str, ...]],
    text: tuple[str, ...],
    label: str,
    predict_what: str,
    folds: int | None,
) -> LabelledData:
    from unmask.classification import LabelledData, Split, column_options, task_data

    if task is not None:
        if any(tables.values()) or text or predict_what != "class":
            raise ValueError(
                f"the tables and columns of the task {task} are known: leave out --train, --valid, --test,"
                " --text and --predict"
            )
        return task_data(task, folder, folds)
    if folder is not None:
        raise ValueError("--data is the folder of named tasks: name one with --task, or give tables with --train")
    if not tables["train"]:
        raise ValueError("there is nothing to train on: give a table with --train, or a --task by its name")
    columns = tuple(column_options(text, label))
    splits = {name: Split(name, sources, columns) for name, sources in tables.items() if sources}
    tests = (splits["test"],) if "test" in splits else ()
    return LabelledData(splits["train"], splits.get("valid"), tests, (), predict_what == "number", folds=folds)


def _with_options(data: LabelledData, **options: Any) -> LabelledData:
    """The same with the options that were given."""
    return replace(data, **{name: value for name, value in options.items() if value is not None})


def _plan_runs(
    experiment: ClassificationExperiment, protocol: Protocol, seeds: int | None, seed: int | None, folds: int | None
) -> dict[str, ClassificationExperiment]:
    """The runs by name: of one or more seeds, or of folds."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {seeds}")
    if folds is not None:
        if seeds is not None:
            raise ValueError("--seeds and --folds are two ways to repeat a run: give one of them")
        return {f"fold-{number + 1}": experiment.with_fold(number, folds) for number in range(folds)}
    first = protocol.seeds[0] if seed is None else seed
    count = seeds or (len(protocol.seeds) if seed is None else 1)
    return {f"seed-{number}": experiment.with_seed(number) for number in range(first, first + count)}


def _run(
    runs: dict[str, ClassificationExperiment],
    out: Path,
    protocol: Protocol,
    task: str | None,
    restart: bool,
    as_json: bool,
    allow_code: bool,
) -> None:
    from unmask.classification import run_many
    from unmask.distributed import init_distributed

    with init_distributed() as distributed:
        speaks = distributed.is_main
        for note in protocol.notes if speaks else ():
            print(f"note: {note}", file=sys.stderr)

        def announce(name: str) -> None:
            if speaks and len(runs) > 1:
                print(f"{name}:", file=sys.stderr, flush=True)

        results = run_many(runs, out, distributed, restart=restart, allow_code=allow_code, on_start=announce)
    if results is None:
        sys.exit(3)
    if not speaks:
        return
    if as_json:
        print_json({**results.to_json(), "notes": list(protocol.notes)})
        return
    _print_results(results, task)
    print(out)


def _read(
    model: Classifier, sources: tuple[str, ...], text: tuple[str, ...], label: str | None, skip_empty: bool = False
) -> Table:
    """The rows of tables in the columns of the training rows, or in others."""
    from unmask.classification import column_options, read_table

    trained = model.config.columns
    if text and len(text) != len(trained):
        raise ValueError(f"this classifier reads {len(trained)} columns of text; --text names {len(text)}")
    options = list(column_options(text or trained, label))
    if not text and len(trained) == 1:
        options += column_options((), label)
    return read_table(sources, options, with_labels=label is not None, skip_empty=skip_empty)


def _tell_cut(name: str, count: int, model: Classifier) -> None:
    if count:
        print(f"{count:,} rows of {name} are cut to {model.config.max_length} tokens", file=sys.stderr)


def _print_results(results: Results, task: str | None) -> None:
    from unmask.classification import find_task

    if len(results.runs) == 1:
        (run,) = results.runs.values()
        _print_evaluations(run.evaluations)
        return
    header = ("test", "figure", "mean", "range (max - min)", "standard error", "runs")
    reported = "" if task is None else find_task(task).metric
    lines = [
        (
            test,
            f"{name}{' *' if name == reported else ''}",
            f"{summary.mean:.4f}",
            f"{summary.range:.4f}",
            "-" if summary.standard_error is None else f"{summary.standard_error:.4f}",
            str(len(summary.values)),
        )
        for test, figures in results.summaries().items()
        for name, summary in figures.items()
    ]
    if lines:
        print_table(header, lines)


def _print_evaluations(found: Mapping[str, Evaluation]) -> None:
    lines = [
        (test, name, format_estimate(metric.value, metric.standard_error), _interval(metric), f"{each.rows:,}")
        for test, each in found.items()
        for name, metric in each.metrics.items()
    ]
    if lines:
        print_table(("test", "figure", "value", "95 % interval", "rows"), lines)


def _interval(metric: Metric) -> str:
    return "-" if metric.low is None or metric.high is None else f"{metric.low:.4f} to {metric.high:.4f}"


def _print_confusion(names: tuple[str, ...], evaluation: Evaluation) -> None:
    if not evaluation.confusion:
        return
    print("\nrows by label (line) and prediction (column)")
    lines = [(name, *map(str, counts)) for name, counts in zip(names, evaluation.confusion, strict=True)]
    print_table(("", *names), lines)
