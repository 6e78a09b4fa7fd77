"""A table of finished cells, as JSON and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unmask.report.formatting import format_estimate
from unmask.reproduce._vocabulary import Measurement, Setup, Table, collect_results, summarize

_FACTS = ("training", "steps", "tokens", "learning_rate_factor", "seconds", "load", "provenance")
"""What a table keeps of each of its cells."""


def table_to_json(
    table: Table, setup: Setup, measurements: Sequence[Measurement], plan: Mapping[str, Any]
) -> dict[str, Any]:
    """All that is known of a table: figures, the paper's beside them, verdicts, and what made them."""
    results = collect_results(measurements)
    rows = []
    for row in table.rows:
        figures: dict[str, Any] = {}
        for column in table.columns:
            seeds = results.get((row.key, column.key))
            if seeds:
                mean, error = summarize(seeds)
                values = {str(seed): list(estimate) for seed, estimate in seeds.items()}
                figures[column.key] = {"mean": mean, "error": error, "seeds": values}
        rows.append({"key": row.key, "label": row.label, "figures": figures, "paper": dict(row.paper)})
    return {
        "name": table.name,
        "number": table.number,
        "title": table.title,
        "scale": setup.scale,
        "columns": [column._asdict() for column in table.columns],
        "rows": rows,
        "claims": [_claim_to_json(table, index, results) for index in range(len(table.claims))],
        "protocol": list(table.protocol),
        "plots": {"columns": list(table.plot_columns or [table.columns[0].key]), "curve": table.curve},
        "plan": {key: plan.get(key) for key in ("minutes", "steps", "rates", "bf16")},
        "cells": [_cell_to_json(each) for each in measurements],
    }


def _claim_to_json(table: Table, index: int, results: Any) -> dict[str, Any]:
    claim = table.claims[index]
    verdict = claim.test(results)
    return {
        "text": claim.text,
        "outcome": verdict.outcome,
        "p_reproduced": verdict.p_reproduced,
        "p_refuted": verdict.p_refuted,
        "evidence": verdict.evidence,
        "test": claim.method,
    }


def _cell_to_json(measurement: Measurement) -> dict[str, Any]:
    facts = {name: measurement.facts.get(name) for name in _FACTS}
    return {"method": measurement.method, "seed": measurement.seed, **facts}


def table_lines(data: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of text: a column with our figure, and one with the paper's where it has any.

    Columns of which nothing was measured are left out.
    """
    header, keys = [""], []
    for column in data["columns"]:
        if not any(column["key"] in row["figures"] for row in data["rows"]):
            continue
        header.append(column["label"])
        keys.append((column["key"], False))
        if any(column["key"] in row["paper"] for row in data["rows"]):
            header.append("paper")
            keys.append((column["key"], True))
    rows = [[row["label"], *(_entry(row, key, paper) for key, paper in keys)] for row in data["rows"]]
    return header, rows


def _entry(row: Mapping[str, Any], key: str, paper: bool) -> str:
    if paper:
        return str(row["paper"].get(key, ""))
    figure = row["figures"].get(key)
    return "" if figure is None else format_estimate(figure["mean"], figure["error"])


def outcome_in_words(outcome: str) -> str:
    """A verdict as it is told."""
    return "undecided at this scale" if outcome == "undecided" else outcome


def seeds_done(data: Mapping[str, Any]) -> int:
    """The seeds of which there are cells."""
    return len({cell["seed"] for cell in data["cells"]})
