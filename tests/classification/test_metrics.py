"""Figures agree with the golden ones and with scikit-learn; intervals hold what they promise."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from sklearn.metrics import f1_score, matthews_corrcoef

from unmask.classification import Labels, evaluate
from unmask.classification._metrics import confusion_figures, summarize

CLASSES = {2: Labels(("0", "1")), 3: Labels(("0", "1", "2"))}


def test_golden_figures(golden: Path) -> None:
    found = load_file(golden / "glue_metrics" / "expected.safetensors")
    expected = {name.removeprefix("metric."): float(value) for name, value in found.items() if "metric" in name}
    for name, classes in (("binary", 2), ("three", 3)):
        labels, predictions = (found[f"{name}.{kind}"].astype(float) for kind in ("labels", "predictions"))
        result = evaluate(CLASSES[classes], labels, predictions)
        assert result.value("accuracy") == pytest.approx(expected[f"accuracy.{name}"])
        assert result.value("matthews") == pytest.approx(expected[f"matthews.{name}"])
        f1 = expected["f1.binary" if classes == 2 else "f1.macro.three"]
        assert result.value("f1") == pytest.approx(f1)
    scores = evaluate(Labels(), found["score.labels"], found["score.predictions"], resamples=20)
    assert scores.value("pearson") == pytest.approx(expected["pearson"])
    assert scores.value("spearman") == pytest.approx(expected["spearman"])


def test_predictions_that_are_all_alike(golden: Path) -> None:
    config = json.loads((golden / "glue_metrics" / "config.json").read_text())
    assert config  # the golden values of constant predictions are 0
    labels = np.array([0.0, 1.0, 1.0, 0.0])
    result = evaluate(CLASSES[2], labels, np.zeros(4))
    assert (result.value("matthews"), result.value("f1")) == (0.0, 0.0)
    numbers = evaluate(Labels(), labels, np.ones(4))
    assert numbers.metrics["pearson"].value is None
    assert math.isnan(numbers.value("spearman"))


@settings(max_examples=40)
@given(st.integers(2, 4), st.data())
def test_drawn_figures_are_those_of_scikit_learn(classes: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, classes - 1)] * 2), min_size=1, max_size=30))
    targets, predictions = np.array(pairs).T
    counts = np.zeros((1, classes, classes))
    np.add.at(counts[0], (targets, predictions), 1)
    figures = confusion_figures(counts)
    average = "binary" if classes == 2 else "macro"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert figures["matthews"][0] == pytest.approx(matthews_corrcoef(targets, predictions))
        assert figures["f1"][0] == pytest.approx(f1_score(targets, predictions, average=average, zero_division=0.0))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """200 test sets of 150 rows: a binomial count of about 190 covers."""
    random = np.random.default_rng(0)
    covers = {"accuracy": 0, "matthews": 0, "f1": 0}
    truth = {"accuracy": 0.8, "matthews": 0.6, "f1": 0.8}
    for _ in range(200):
        targets = random.integers(2, size=150)
        predictions = np.where(random.random(150) < 0.8, targets, 1 - targets)
        result = evaluate(CLASSES[2], targets.astype(float), predictions.astype(float), resamples=300)
        for name, metric in result.metrics.items():
            assert metric.low is not None
            assert metric.high is not None
            covers[name] += metric.low <= truth[name] <= metric.high
    assert all(178 <= count <= 199 for count in covers.values()), covers


def test_the_confusion_matrix_has_labels_in_lines() -> None:
    result = evaluate(CLASSES[2], np.array([0.0, 0, 0, 1]), np.array([1.0, 1, 0, 1]))
    assert result.confusion == ((1, 2), (0, 1))
    assert result.rows == 4


def test_several_runs_have_a_mean_a_range_and_a_standard_error() -> None:
    summary = summarize([0.5, 0.7, 0.9])
    assert (summary.mean, summary.range) == (pytest.approx(0.7), pytest.approx(0.4))
    assert summary.standard_error == pytest.approx(0.2 / math.sqrt(3))
    assert summarize([0.5]).standard_error is None
