"""Carry out tables in a folder: the cells that are not done, then tables, verdicts and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unmask.distributed import Distributed
from unmask.io.atomic import atomic_file, write_json
from unmask.io.untrusted import read_json_object
from unmask.report import require_matplotlib
from unmask.reproduce._lab import Lab, run_cells
from unmask.reproduce._results import table_to_json
from unmask.reproduce._shards import in_order, join_folders, select_shard
from unmask.reproduce._tables import TABLES
from unmask.reproduce._vocabulary import Cell, Setup, Table

_RESULTS = "results"


def reproduce(
    tables: Sequence[Table],
    setup: Setup,
    folder: Path,
    distributed: Distributed = Distributed(),  # noqa: B008
    *,
    shard: tuple[int, int] | None = None,
    tell: Callable[[str], None] = lambda _line: None,
    show: Callable[[dict[str, Any]], None] = lambda _table: None,
) -> list[dict[str, Any]]:
    """The tables as JSON, after all of their cells that were not done yet; `show` gets each as soon as it is whole.

    A table that needs what is not there is left out, and `tell` is given the reason. The same call again, also after
    kill -9, does only what is missing. `shard` (i, n): only every n-th training; `join_cells` brings them together.
    """
    require_matplotlib()
    lab = Lab(folder, setup, distributed)
    possible = []
    for table in tables:
        why = table.missing(setup)
        if why is None:
            possible.append(table)
        else:
            tell(f"{table.name} is left out: {why}")
    if not possible:
        raise ValueError(f"none of the tables can be carried out: {tables[0].missing(setup)}")
    lab.open()
    distributed.barrier()
    cells = select_shard(in_order([cell for table in possible for cell in table.cells(setup)]), shard)

    def whole(table: Table) -> None:
        if distributed.is_main:
            show(write_tables(folder, setup, [table])[0])

    run_cells(lab, possible, cells, tell, whole)
    return write_tables(folder, setup, possible) if distributed.is_main else []


def write_tables(folder: Path, setup: Setup, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """The tables of the finished cells in a folder; writes their JSON files and the page of all that were written."""
    from unmask.reproduce._page import render_tables

    lab = Lab(folder, setup)
    written = []
    for table in tables:
        measurements = lab.measurements(table)
        if measurements:
            written.append(table_to_json(table, setup, measurements, lab.plan()))
            write_json(folder / _RESULTS / f"{table.name}.json", written[-1])
    stored = [folder / _RESULTS / f"{name}.json" for name in TABLES]
    everything = [read_json_object(file) for file in stored if file.exists()]
    page = render_tables(everything)
    with atomic_file(folder / "index.html") as file:
        file.write_text(page, encoding="utf-8")
    return written


def join_cells(folder: Path, setup: Setup, others: Sequence[Path]) -> int:
    """Copy the finished cells of other folders, such as those of shards, into this one; how many were new."""
    return join_folders(Lab(folder, setup), others)


def pending_cells(tables: Sequence[Table], setup: Setup, folder: Path) -> list[Cell]:
    """The cells that are not done."""
    lab = Lab(folder, setup)
    return [cell for table in tables for cell in table.cells(setup) if lab.read(cell) is None]
