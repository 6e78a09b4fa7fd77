"""Write docs/reproduction.md and docs/results from the folder of a reproduction.

    python tools/reproduction.py runs/reproduce

Every figure and every verdict of the document is in the JSON files, which `unmask reproduce` wrote. The finished cells
are copied, too: `unmask reproduce all --join docs/results` goes on from there. What somebody wrote between the lines
`<!-- remarks: TABLE -->` and `<!-- end -->` stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.io.atomic import write_json
from unmask.reproduce import TABLES, outcome_in_words, seeds_done, table_lines

_INTRO = (
    "# Reproduction of the paper\n\n"
    "Every table of the MDLM paper (arXiv 2406.07524), carried out by `unmask reproduce` at the scale {scale}: {sizes}."
    " Ours is the mean over seeds ± its standard error; the paper's figures stand beside it, and are those of its own"
    " models and data. A claim is *reproduced* if a test on the seeds rejects its opposite at the 5 % level, *refuted*"
    " if it rejects the claim, and *undecided at this scale* otherwise."
    " [evaluation.md](evaluation.md#the-papers-tables)"
    " says how cells are run; this page is written by `tools/reproduction.py` from [results/](results).\n"
)
_SIZES = {
    "tiny": "small networks, small texts, minutes of training on two CPU cores",
    "paper": "the networks, steps and data of the paper",
}


def document(tables: Sequence[Mapping[str, Any]], remarks: Mapping[str, str]) -> str:
    """The whole page; `remarks`: what somebody wrote about a table."""
    scales = list(dict.fromkeys(table["scale"] for table in tables))
    intro = _INTRO.format(scale=" and ".join(scales), sizes="; ".join(_SIZES[scale] for scale in scales))
    sections = (_section(table, remarks.get(table["name"], "\n")) for table in tables)
    return "\n".join([intro, _summary(tables), *sections])


def find_remarks(page: str) -> dict[str, str]:
    """What was written about each table of a page."""
    return dict(re.findall(r"<!-- remarks: (\S+) -->\n(.*?)<!-- end -->", page, re.DOTALL))


def _summary(tables: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| {table['number']} | {claim['text']} | {outcome_in_words(claim['outcome'])} |"
        for table in tables
        for claim in table["claims"]
    ]
    return "\n".join(["## Claims", "", "| table | claim | verdict |", "|---|---|---|", *lines, ""])


def _section(table: Mapping[str, Any], remarks: str) -> str:
    header, rows = table_lines(table)
    lines = [
        f"## {table['number']}: {table['title']}",
        "",
        f"`unmask reproduce {table['name']}`: {seeds_done(table)} seeds, {_budget(table)}.",
        "",
        _markdown_row(header),
        "|" + "---|" * len(header),
        *map(_markdown_row, rows),
        "",
    ]
    claims = [
        f"- **{outcome_in_words(claim['outcome'])}**: {claim['text']} {_escape(claim['evidence'])};"
        f" p = {claim['p_reproduced']:.2g} against its opposite, {claim['p_refuted']:.2g} against it"
        f" ({claim['test']})."
        for claim in table["claims"]
    ]
    marked = f"<!-- remarks: {table['name']} -->\n{remarks}<!-- end -->"
    return "\n".join([*lines, *claims, "", marked, "", *table["protocol"], ""])


def _budget(table: Mapping[str, Any]) -> str:
    """Steps and tokens of each method, once for those that have the same."""
    budgets: dict[tuple[int, int], list[str]] = {}
    for cell in table["cells"]:
        names = budgets.setdefault((cell["steps"], cell["tokens"]), [])
        if cell["method"] not in names:
            names.append(cell["method"])
    return "; ".join(
        f"{steps:,} steps or {tokens:,} tokens for {', '.join(names)}" for (steps, tokens), names in budgets.items()
    )


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def write(folder: Path, docs: Path) -> Path:
    """Copy plan, cells and results, without what names folders of the machine, and write the page."""
    stored = [folder / "results" / f"{name}.json" for name in TABLES]
    tables = [json.loads(file.read_text(encoding="utf-8")) for file in stored if file.exists()]
    if not tables:
        raise SystemExit(f"{folder} has no results/*.json: run `unmask reproduce` first")
    results = docs / "results"
    write_json(results / "plan.json", json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    for file in sorted(folder.glob("cells/*/*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))
        cell.pop("experiment", None)  # its files have names of the machine; joined cells have none
        cell["provenance"].pop("command", None)
        write_json(results / file.relative_to(folder), cell)
    for table in tables:
        for cell in table["cells"]:
            cell["provenance"].pop("command", None)
        write_json(results / f"{table['name']}.json", table)
    page = docs / "reproduction.md"
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(document(tables, find_remarks(before)), encoding="utf-8")
    return page


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(write(Path(sys.argv[1]), Path(__file__).parents[1] / "docs"))
