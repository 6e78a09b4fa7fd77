"""The file of a measurement: one cell of a table, its figures and where they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.io.untrusted import read_json_object
from unmask.reproduce._vocabulary import Estimate, Figures, Measurement

FORMAT = "unmask-reproduce-1"
"""The format of plans and measurements."""


def measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    """A measurement as its file holds it."""
    figures = {
        row: {column: list(estimate) for column, estimate in columns.items()}
        for row, columns in measurement.figures.items()
    }
    return {
        "format": FORMAT,
        "table": measurement.table,
        "method": measurement.method,
        "seed": measurement.seed,
        "figures": figures,
        **measurement.facts,
    }


def read_measurement(file: Path) -> Measurement:
    """A measurement of a file, which is checked."""
    data = read_json_object(file)
    if data.pop("format", None) != FORMAT:
        raise ValueError(f"{file} is not a measurement of this version of unmask; remove it, and it is measured again")
    try:
        figures: Figures = {
            str(row): {str(column): Estimate(float(value), float(error)) for column, (value, error) in columns.items()}
            for row, columns in data.pop("figures").items()
        }
        table, method, seed = (data.pop(name) for name in ("table", "method", "seed"))
        return Measurement(str(table), str(method), int(seed), figures, data)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is damaged; remove it, and it is measured again") from None
