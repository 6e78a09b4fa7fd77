"""Predictions of a classifier in a file: a table with the texts, the prediction and the probabilities."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.classification._classifier import Classifier
from unmask.classification._table import Table
from unmask.io.atomic import atomic_file
from unmask.io.errors import os_errors_as_value_error

_SUFFIXES = (".csv", ".jsonl")


def check_output(path: Path) -> None:
    """Refuse a file of another format before anything is computed."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path} must end in {' or '.join(_SUFFIXES)}, which says how predictions are written")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; predictions are written to a file")


def write_predictions(classifier: Classifier, table: Table, logits: NDArray[np.float64], path: Path) -> None:
    """A line for each row of the table, in its order; the file is replaced only once it is complete.

    In CSV the probability of a class is in the column "probability of CLASS".
    """
    check_output(path)
    decided = [classifier.labels.name(value) for value in classifier.decide(logits)]
    shares: list[dict[str, float]] = (
        [{} for _ in decided] if classifier.labels.is_number else classifier.probabilities(logits)
    )
    rows = [
        {**dict(zip(table.columns, texts, strict=True)), "prediction": prediction, "probabilities": share}
        for texts, prediction, share in zip(table.texts, decided, shares, strict=True)
    ]
    with os_errors_as_value_error(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            (_write_csv if path.suffix == ".csv" else _write_jsonl)(file, rows)


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        kept = row if row["probabilities"] else {name: value for name, value in row.items() if name != "probabilities"}
        lines.append(json.dumps(kept, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    flat = [
        {
            **{name: value for name, value in row.items() if name != "probabilities"},
            **{f"probability of {label}": share for label, share in row["probabilities"].items()},
        }
        for row in rows
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
