"""Cells in the order in which they are carried out, spread over several machines, and their folders joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.io.atomic import write_json
from unmask.reproduce._lab import Lab
from unmask.reproduce._measurements import measurement_to_json, read_measurement
from unmask.reproduce._vocabulary import Cell


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Seed by seed, and each training with all that measures it, so that an end at any time leaves whole rows."""
    names = list(dict.fromkeys(cell.training.name for cell in cells))
    return sorted(cells, key=lambda cell: (cell.seed, names.index(cell.training.name)))


def select_shard(cells: Sequence[Cell], shard: tuple[int, int] | None) -> list[Cell]:
    """The cells of shard (i, n), counted from 1: all that measure the same training are in the same shard."""
    if shard is None:
        return list(cells)
    index, count = shard
    if not 1 <= index <= count:
        raise ValueError(f"a shard is written I/N with 1 <= I <= N; got {index}/{count}")
    names = list(dict.fromkeys(cell.training.name for cell in cells))
    return [cell for cell in cells if names.index(cell.training.name) % count == index - 1]


def join_folders(lab: Lab, others: Sequence[Path]) -> int:
    """Copy the cells of other folders into this one; the number of new ones. All must have the same plan."""
    joined = 0
    for folder in others:
        other = Lab(folder, lab.setup)
        theirs = other.plan()
        if not theirs:
            raise ValueError(f"{folder} is not the folder of a reproduction: it has no plan.json")
        with lab.edit_plan() as plan:
            _merge_plans(plan, theirs, folder)
        for file in sorted(folder.glob("cells/*/*.json")):
            target = lab.folder / file.relative_to(folder)
            measurement = read_measurement(file)
            if target.exists():
                if read_measurement(target).figures != measurement.figures:
                    raise ValueError(f"{file} and {target} are the same cell with different figures: remove one")
                continue
            write_json(target, measurement_to_json(measurement))
            joined += 1
    return joined


def _merge_plans(plan: dict[str, Any], theirs: Mapping[str, Any], folder: Path) -> None:
    """Steps and rates of both, which must not contradict each other."""
    for name in ("format", "scale", "minutes", "bf16"):
        if plan.setdefault(name, theirs.get(name)) != theirs.get(name):
            raise ValueError(
                f"{folder} was planned with {name} {theirs.get(name)}, and this folder with {plan[name]}: their cells"
                " cannot be compared"
            )
    for name in ("steps", "seconds_per_step", "rates"):
        mine = plan.setdefault(name, {})
        for key, value in theirs.get(name, {}).items():
            if name == "steps" and mine.setdefault(key, value) != value:
                raise ValueError(
                    f"{folder} trains {key} for {value:,} steps, and this folder for {mine[key]:,}: copy plan.json"
                    " to every machine before its first cell, so that all have equal steps"
                )
            mine.setdefault(key, value)
