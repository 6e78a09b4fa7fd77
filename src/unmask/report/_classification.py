"""The report of a classifier's run, or of several seeds or folds: figures, confusion matrices and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unmask.classification import RESULTS_FILE, Evaluation, Results, RunResult
from unmask.io.untrusted import read_json_object
from unmask.report._page import cards_html, figures_html, flatten_settings, html_page, section_html, table_html
from unmask.report._plotting import INK_COLOR, PALETTE, Plot, nan_gaps, render_plot
from unmask.report._run_log import read_curves
from unmask.report.formatting import MISSING_VALUE, format_with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXPERIMENT_FILE = "experiment.json"
_KIND = "ClassificationExperiment"
_MAX_NAMED_CLASSES = 12
"""Classes of a confusion matrix up to which its cells are written out."""


def is_classification_run(run: Path) -> bool:
    """Whether a folder is that of a classifier's run, or of several."""
    if (run / _EXPERIMENT_FILE).exists():
        return read_json_object(run / _EXPERIMENT_FILE).get("kind") == _KIND
    return (run / RESULTS_FILE).exists() and "runs" in read_json_object(run / RESULTS_FILE)


def classification_page(run: Path) -> tuple[str, dict[str, Any], dict[str, Plot]]:
    """The HTML document, its data and its plots."""
    results, provenance = _read_results(run)
    folders = {name: run if len(results.runs) == 1 else run / name for name in results.runs}
    settings = read_json_object(next(iter(folders.values())) / _EXPERIMENT_FILE)
    labels = _labels(next(iter(folders.values())))
    evaluations = _pooled(results)
    plots = [_confusion_plot(test, each, labels) for test, each in evaluations.items() if each.confusion]
    plots += [_loss_plot(folders), *_validation_plots(results)]
    name = run.resolve().name
    body = "\n".join(
        [
            _header(name, settings, results),
            section_html("figures", "In figures", _figures_section(results)),
            section_html("curves", "Confusion and curves", figures_html(plots)),
            section_html("settings", "Settings", table_html(flatten_settings(settings))),
            section_html("provenance", "Provenance", table_html(flatten_settings(provenance))),
        ]
    )
    footer = "All numbers of this page are in report.json, and all plots are PNG files in the same folder."
    data = {"name": name, "settings": settings, "provenance": provenance, **results.to_json()}
    return html_page(name, body, footer), data, {plot.name: plot for plot in plots}


def _read_results(run: Path) -> tuple[Results, dict[str, Any]]:
    file = run / RESULTS_FILE
    if not file.exists():
        raise ValueError(f"{run} has no results yet: give its command again, so that it ends")
    stored = read_json_object(file)
    provenance = stored.pop("provenance", {})
    try:
        found = stored["runs"] if "runs" in stored else {f"seed-{stored['seed']}": stored}
        return Results({name: RunResult.from_json(each) for name, each in found.items()}), provenance
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__} {error}") from None


def _labels(run: Path) -> tuple[str, ...]:
    config = run / "model" / "config.json"
    return tuple(map(str, read_json_object(config).get("labels") or ())) if config.exists() else ()


def _pooled(results: Results) -> dict[str, Evaluation]:
    """The evaluations of all runs, with the confusion matrices of a test set added up."""
    found: dict[str, Evaluation] = {}
    for run in results.runs.values():
        for test, each in run.evaluations.items():
            before = found.get(test)
            total = np.array(each.confusion) + (0 if before is None else np.array(before.confusion))
            lines = tuple(tuple(map(int, line)) for line in total) if each.confusion else ()
            found[test] = Evaluation(each.rows + (0 if before is None else before.rows), each.metrics, lines)
    return found


def _header(name: str, settings: Mapping[str, Any], results: Results) -> str:
    data = settings.get("data") or {}
    train = data.get("train") or {}
    sources = ", ".join(map(str, train.get("sources", ()))) or "its test rows, in folds"
    runs = f"{len(results.runs)} runs" if len(results.runs) > 1 else "one run"
    return f"""<header>
<p class="over">Report of a classifier</p>
<h1>{escape(name)}</h1>
<p class="lead">Started from {escape(str(settings.get("init_from")))}, trained on {escape(sources)}; {runs}.</p>
</header>"""


def _figures_section(results: Results) -> str:
    several = len(results.runs) > 1
    parts = []
    for test, figures in results.summaries().items():
        cards = []
        for name, summary in figures.items():
            (only, *_) = results.runs.values()
            error = summary.standard_error if several else only.evaluations[test].metrics[name].standard_error
            value, shown = format_with_error(summary.mean, error)
            cards.append((f"{name}, {test}", value, shown))
        parts.append(cards_html(cards, "headline first"))
        parts.append(table_html(_lines(results, test, several)))
    if not parts:
        return '<p class="note">Nothing was tested.</p>'
    note = (
        "± is the standard error of the mean over the runs; the range is max - min."
        if several
        else "± is the standard error from the choice of the test rows, by a bootstrap."
    )
    return "".join([*parts, f'<p class="note">{note}</p>'])


def _lines(results: Results, test: str, several: bool) -> list[tuple[str, str]]:
    """Range and values over the runs or, of one run, the confidence interval of each figure."""
    lines = []
    for name, summary in results.summaries()[test].items():
        if several:
            values = ", ".join(f"{value:.4f}" for value in summary.values)
            lines.append((f"{name}: range; each run", f"{summary.range:.4f}; {values}"))
            continue
        (run,) = results.runs.values()
        metric = run.evaluations[test].metrics[name]
        interval = (
            MISSING_VALUE if metric.low is None or metric.high is None else f"{metric.low:.4f} to {metric.high:.4f}"
        )
        lines.append((f"{name}: 95 % interval", interval))
    return lines


def _confusion_plot(test: str, evaluation: Evaluation, labels: Sequence[str]) -> Plot:
    counts = np.array(evaluation.confusion)
    names = list(labels) if len(labels) == len(counts) else [str(number) for number in range(len(counts))]
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)

    def draw(axes: Axes) -> None:
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        if len(names) <= _MAX_NAMED_CLASSES:
            axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 3 else 0)
            axes.set_yticks(range(len(names)), names)
            for line, column in np.ndindex(*counts.shape):
                color = "white" if shares[line, column] > 0.5 else "#1b3a5c"
                axes.text(column, line, f"{counts[line, column]:,}", ha="center", va="center", color=color)
        axes.set(xlabel="prediction", ylabel="label")

    right = int(np.trace(counts))
    return render_plot(
        f"confusion-{test}",
        f"Rows of {test} by label and prediction; the colour is the share of the label's rows.",
        f"Confusion matrix of {test}: {right:,} of {int(counts.sum()):,} rows are right.",
        draw,
        ("label", *(f"predicted {name}" for name in names)),
        [(name, *map(int, line)) for name, line in zip(names, counts, strict=True)],
    )


def _loss_plot(folders: Mapping[str, Path]) -> Plot:
    curves = {name: read_curves(folder) for name, folder in folders.items()}

    def draw(axes: Axes) -> None:
        for number, (name, curve) in enumerate(curves.items()):
            color = PALETTE[number % len(PALETTE)]
            if len(curves) == 1:
                axes.plot(curve.step, nan_gaps(curve.loss), color=color, alpha=0.4, linewidth=1)
            axes.plot(curve.step, nan_gaps(curve.smoothed()), color=color, label=name)
        axes.set(xlabel="step", ylabel="training loss")
        axes.legend()

    return render_plot(
        "training-loss", "Training loss, a running mean.", "Training loss against the step, a line for each run.", draw
    )


def _validation_plots(results: Results) -> list[Plot]:
    """A plot for each figure of the validation rows, against the epoch."""
    epochs = {name: run.epochs for name, run in results.runs.items() if run.epochs}
    figures = list(next(iter(epochs.values()))[0]) if epochs else []

    def make(figure: str) -> Plot:
        from matplotlib.ticker import MaxNLocator

        def draw(axes: Axes) -> None:
            for number, (name, history) in enumerate(epochs.items()):
                values = nan_gaps([epoch.get(figure) for epoch in history])
                color = PALETTE[number % len(PALETTE)]
                axes.plot(range(1, len(values) + 1), values, color=color, marker="o", markersize=4, label=name)
                best = results.runs[name].best_epoch
                if best is not None:
                    axes.plot([best], [values[best - 1]], color=INK_COLOR, marker="o", markersize=7, fillstyle="none")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(xlabel="epoch", ylabel=figure.replace("_", " "))
            axes.legend()

        what = figure.removeprefix("valid_")
        rows = [(name, number, epoch.get(figure)) for name, h in epochs.items() for number, epoch in enumerate(h, 1)]
        return render_plot(
            figure.replace("_", "-"),
            f"{what} of the validation rows after each epoch; the circle is the epoch that was tested.",
            f"{what} of the validation rows against the epoch.",
            draw,
            ("run", "epoch", what),
            rows,
        )

    return [make(figure) for figure in figures]
