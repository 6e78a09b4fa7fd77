"""`unmask reproduce`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unmask.cli._arguments import JsonFlag, print_json
from unmask.cli._signature import Option, Positional
from unmask.report.formatting import print_table

if TYPE_CHECKING:
    from unmask.reproduce import Setup, Table

_TableNames = Annotated[tuple[str, ...], Positional(), Option(completions="unmask.reproduce:TABLES")]
_ListFlag = Annotated[bool, Option(name="list")]
_DEFAULT_MINUTES = 5.0


def reproduce(
    tables: _TableNames = (),
    list_tables: _ListFlag = False,
    scale: Literal["tiny", "paper"] = "tiny",
    plan: bool = False,
    minutes: float | None = None,
    seeds: int = 3,
    data: Path | None = None,
    reference_model: str | None = None,
    out: Path = Path("runs/reproduce"),
    shard: Annotated[str | None, Option(metavar="I/N")] = None,
    join: tuple[Path, ...] = (),
    as_json: JsonFlag = False,
) -> None:
    """Reproduce tables of the MDLM paper: train, measure, and judge its claims.

    For example:
      unmask reproduce --list
      unmask reproduce lm ablation schedules steps time --minutes 1
      unmask reproduce all --plan --scale paper
      unmask reproduce all --data my_data --seeds 5 --out runs/paper
      unmask reproduce lm --shard 1/2 --out runs/half

    A cell is one experiment with one seed. Methods of a table have the same text, the same number of tokens and the
    same tuning: of each learning rate, half and twice as much were worse in pilots of a third of the steps. Give the
    same command again to go on where it was, also after a power failure: nothing is done twice.

    Args:
        tables: Tables by their names (`--list` shows them), or all.
        list_tables: List the tables and their claims, and stop.
        scale: The sizes of networks and texts: tiny, for two cores, or those of the paper.
        plan: Print what it would take, and stop: cells, time or GPU-days, data.
        minutes: Training time of a cell at the scale tiny; the steps that fit are measured once (5 if not given).
        seeds: Cells of each experiment; verdicts need at least 2.
        data: The folder with data sets; by default the source of Python's standard library is the text.
        reference_model: The causal language model that scores generated texts: a folder or a .gguf file.
        out: The folder of runs, measurements, tables and the page.
        shard: Only part I of N, for several machines: copy plan.json to each, and join the folders.
        join: Folders whose cells are copied into --out before it goes on.
    """
    from unmask.reproduce import TABLES, Setup, plan_tables

    if list_tables:
        _print_list(list(TABLES.values()))
        return
    if scale == "paper" and minutes is not None:
        raise ValueError("--minutes is for --scale tiny: the paper's scale has the paper's steps")
    setup = Setup(scale, data, _DEFAULT_MINUTES if minutes is None else minutes, seeds, reference_model)
    chosen = _choose(tables, TABLES)
    if plan:
        plans = plan_tables(chosen, setup)
        if as_json:
            print_json({"plan": plans})
        else:
            _print_plan(plans, setup)
        return
    _carry_out(chosen, setup, out, _parse_shard(shard), join, as_json)


def _choose(names: Sequence[str], known: Mapping[str, Table]) -> list[Table]:
    from unmask.config import lookup

    if not names:
        raise ValueError(f"unmask reproduce needs TABLES: {', '.join(known)}, or all (`--list` shows them)")
    if "all" in names:
        return list(known.values())
    return [lookup(name, known, "table") for name in dict.fromkeys(names)]


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard is written I/N, part I of N, as in 1/2; got {text!r}")
    return int(match[1]), int(match[2])


def _carry_out(
    tables: Sequence[Table],
    setup: Setup,
    out: Path,
    shard: tuple[int, int] | None,
    join: Sequence[Path],
    as_json: bool,
) -> None:
    from unmask.distributed import init_distributed
    from unmask.reproduce import Stopped, join_cells, reproduce

    shown: set[str] = set()

    def show(table: dict[str, Any]) -> None:
        shown.add(table["name"])
        if not as_json:
            _print_table(table)

    with init_distributed() as distributed:
        tell = _print_progress if distributed.is_main else _print_nothing
        if join and distributed.is_main:
            tell(f"{join_cells(out, setup, join):,} cells joined")
        distributed.barrier()
        try:
            results = reproduce(tables, setup, out, distributed, shard=shard, tell=tell, show=show)
        except Stopped:
            tell("stopped; give the same command again to go on")
            sys.exit(3)
    if not distributed.is_main:
        return
    for table in results:
        if table["name"] not in shown:
            show(table)
    if as_json:
        print_json({"tables": results})
    else:
        print(out / "index.html")


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_nothing(_line: str) -> None:
    pass


def _print_table(data: Mapping[str, Any]) -> None:
    from unmask.reproduce import outcome_in_words, seeds_done, table_lines

    print(f"{data['number']}: {data['title']} ({data['scale']}, seeds: {seeds_done(data)})")
    print_table(*table_lines(data))
    for claim in data["claims"]:
        print(f"{outcome_in_words(claim['outcome'])}: {claim['text']} ({claim['evidence']})")
    print(flush=True)


def _print_list(tables: Sequence[Table]) -> None:
    for table in tables:
        print(f"{table.name:10} {table.number}: {table.title}")
        print(f"{'':10} needs {table.needs.tiny}")
        print(f"{'':10} at the paper's scale {table.needs.paper}")
        for claim in table.claims:
            print(f"{'':10} - {claim.text}")


def _print_plan(plans: Sequence[Mapping[str, Any]], setup: Setup) -> None:
    from unmask.training.logger import format_duration

    costs = ("time",) if setup.is_tiny else ("tokens", "GPU-days (H100)")
    rows = []
    for each in plans:
        cost = [format_duration(60 * each["minutes"])] if setup.is_tiny else _gpu_cells(each)
        shared = f" (and {len(each['shared_trainings'])} shared)" if each["shared_trainings"] else ""
        rows.append((each["name"], str(each["cells"]), f"{len(each['new_trainings'])}{shared}", *cost))
    if setup.is_tiny:
        total: list[str] = [format_duration(60 * sum(each["minutes"] for each in plans))]
    else:
        total = _gpu_cells({key: sum(each[key] for each in plans) for key in ("tokens", "gpu_days")})
    rows.append(("total", str(sum(each["cells"] for each in plans)), "", *total))
    print_table(("table", "cells", "trainings", *costs), rows)
    if not setup.is_tiny:
        print("GPU-days are of matrix products at 40 % of an H100's peak; small state-space networks reach far less.")
    for needs in dict.fromkeys(each["needs"] for each in plans):
        print(f"{', '.join(each['name'] for each in plans if each['needs'] == needs)}: {needs}")
    for each in plans:
        if each["missing"]:
            print(f"{each['name']} is left out: {each['missing']}")


def _gpu_cells(plan: Mapping[str, Any]) -> list[str]:
    return [f"{plan['tokens'] / 1e9:,.1f} G", f"{plan['gpu_days']:,.1f}"]
