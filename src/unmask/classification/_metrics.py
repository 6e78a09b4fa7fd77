"""Figures of merit by scikit-learn and scipy, with confidence intervals.

The interval of the accuracy is Wilson's. The others are percentile intervals of a bootstrap over rows. Of classes,
rows with the same label and prediction are drawn together, as a multinomial draw of the confusion matrix (the same
law), and all draws are evaluated at once, which takes milliseconds; a test compares them with scikit-learn's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.classification._labels import Labels
from unmask.io.errors import import_optional

EXTRA = "classify"
_LEVEL = 0.95
_RESAMPLES = 1000
_SEED = 0
"""Of the bootstrap: the same predictions have the same interval."""

_Values = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A figure with its 95 % confidence interval and its standard error; None where it is not defined."""

    value: float | None
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """How well predictions fit the labels of some rows."""

    rows: int
    metrics: dict[str, Metric]
    confusion: tuple[tuple[int, ...], ...] = ()
    """Rows by label (line) and prediction (column), of classes."""

    def value(self, name: str) -> float:
        """A figure; NaN where it is not defined."""
        value = self.metrics[name].value
        return math.nan if value is None else value

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": self.rows,
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            "confusion": [list(line) for line in self.confusion],
        }


def metric_names(labels: Labels) -> tuple[str, ...]:
    """The figures of a kind of labels, the usual one first."""
    return ("spearman", "pearson") if labels.is_number else ("accuracy", "f1", "matthews")


def evaluate(labels: Labels, targets: _Values, predictions: _Values, resamples: int = _RESAMPLES) -> Evaluation:
    """All figures of predictions (ids of classes, or numbers); `resamples` 0 leaves out the bootstrap's intervals."""
    if len(targets) != len(predictions) or not len(targets):
        raise ValueError(f"there must be a prediction for each label; got {len(predictions)} for {len(targets)}")
    if labels.is_number:
        return _evaluate_numbers(targets, predictions, resamples)
    return _evaluate_classes(len(labels.names), targets.astype(np.int64), predictions.astype(np.int64), resamples)


def _evaluate_classes(
    classes: int, targets: NDArray[np.int64], predictions: NDArray[np.int64], resamples: int
) -> Evaluation:
    sklearn: Any = import_optional("sklearn.metrics", EXTRA)
    stats: Any = import_optional("scipy.stats", EXTRA)
    average = "binary" if classes == 2 else "macro"
    confusion = sklearn.confusion_matrix(targets, predictions, labels=np.arange(classes))
    values = {
        "f1": float(sklearn.f1_score(targets, predictions, average=average, zero_division=0.0)),
        "matthews": _quiet(lambda _: sklearn.matthews_corrcoef(targets, predictions))(None),
    }
    correct, rows = int(np.trace(confusion)), len(targets)
    accuracy = correct / rows
    interval = stats.binomtest(correct, rows).proportion_ci(_LEVEL, method="wilson")
    error = math.sqrt(accuracy * (1 - accuracy) / rows)
    metrics = {"accuracy": Metric(accuracy, float(interval.low), float(interval.high), error)}
    draws = np.random.default_rng(_SEED).multinomial(rows, confusion.ravel() / rows, size=resamples)
    drawn = confusion_figures(draws.reshape(-1, classes, classes).astype(np.float64))
    metrics |= {name: _with_interval(value, drawn[name]) for name, value in values.items()}
    return Evaluation(rows, metrics, tuple(tuple(map(int, line)) for line in confusion))


def confusion_figures(counts: _Values) -> dict[str, _Values]:
    """F1 (of class 1; of more classes, the mean over those that occur) and Matthews' coefficient of each of many
    confusion matrices [N, K, K].

    F1 = 2 tp/(2 tp + fp + fn); Matthews = (c s - sum p_k t_k)/sqrt((s^2 - sum p_k^2)(s^2 - sum t_k^2)), 0 where a
    factor is 0, with c rows right of s, and p_k predictions and t_k labels of class k.
    """
    right, total = np.einsum("nkk->nk", counts), counts.sum((1, 2))
    labels, predictions = counts.sum(2), counts.sum(1)
    both = labels + predictions
    f1 = np.divide(2 * right, both, out=np.zeros_like(right), where=both > 0)
    occurs = (both > 0).sum(1).clip(min=1)
    product = (total**2 - (predictions**2).sum(1)) * (total**2 - (labels**2).sum(1))
    covariance = right.sum(1) * total - (predictions * labels).sum(1)
    matthews = np.divide(covariance, np.sqrt(product), out=np.zeros_like(total), where=product > 0)
    return {"f1": f1[:, 1] if counts.shape[1] == 2 else f1.sum(1) / occurs, "matthews": matthews}


def _evaluate_numbers(targets: _Values, predictions: _Values, resamples: int) -> Evaluation:
    stats: Any = import_optional("scipy.stats", EXTRA)
    functions = {
        "spearman": _quiet(lambda rows: stats.spearmanr(targets[rows], predictions[rows]).statistic),
        "pearson": _quiet(lambda rows: stats.pearsonr(targets[rows], predictions[rows]).statistic),
    }
    rows = len(targets)
    draws = np.random.default_rng(_SEED).integers(rows, size=(resamples, rows))
    return Evaluation(
        rows,
        {
            name: _with_interval(function(slice(None)), np.array([function(draw) for draw in draws], np.float64))
            for name, function in functions.items()
        },
    )


def _with_interval(value: float, drawn: NDArray[np.float64]) -> Metric:
    """The figure of all rows, with the percentiles of those of the draws."""
    if not math.isfinite(value):
        return Metric(None)
    values = drawn[np.isfinite(drawn)]
    if len(values) < 2:
        return Metric(value)
    low, high = np.quantile(values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Metric(value, float(low), float(high), float(np.std(values, ddof=1)))


def _quiet(function: Callable[[Any], Any]) -> Callable[[Any], float]:
    """The same without warnings: a figure that is not defined, as where all predictions are alike, is NaN."""

    def call(argument: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return float(function(argument))
            except ValueError:  # too few rows for a correlation
                return math.nan

    return call


@dataclass(frozen=True)
class Summary:
    """A figure over several runs: seeds or folds."""

    mean: float
    range: float
    """The largest minus the smallest, which the MDLM paper writes after +-."""
    standard_error: float | None
    """Of the mean: the standard deviation over the root of the number of runs; None for one run."""
    values: tuple[float, ...]


def summarize(values: Sequence[float]) -> Summary:
    """Mean, range and standard error of the mean."""
    if not values:
        raise ValueError("there are no values to summarize")
    stats: Any = import_optional("scipy.stats", EXTRA)
    error = float(stats.sem(values)) if len(values) > 1 else None
    return Summary(float(np.mean(values)), float(np.ptp(values)), error, tuple(values))
