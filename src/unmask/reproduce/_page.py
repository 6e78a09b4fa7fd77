"""The page of a reproduction: tables, plots and verdicts in one file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from unmask.report import ERRORBAR_STYLE, PALETTE, Plot, figures_html, html_page, render_plot, section_html
from unmask.reproduce._results import outcome_in_words, seeds_done, table_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def render_tables(tables: Sequence[Mapping[str, Any]], plot_columns: Mapping[str, Sequence[str]]) -> str:
    """The HTML document of tables as `table_to_json` gives them; `plot_columns`: what is plotted of each."""
    sections = [_summary(tables)]
    for data in tables:
        columns = plot_columns.get(data["name"]) or (data["columns"][0]["key"],)
        plots = [plot for key in columns if (plot := _plot(data, key)) is not None]
        body = _notes(data) + _table(data) + _claims(data["claims"]) + figures_html(plots)
        sections.append(section_html(data["name"], f"{data['number']}: {data['title']}", body))
    title = "The tables of the MDLM paper"
    head = f'<header><p class="over">Reproduction</p><h1>{title}</h1></header>'
    return html_page(title, "\n".join([head, *sections]), "All numbers are in the JSON files beside this page.")


def _summary(tables: Sequence[Mapping[str, Any]]) -> str:
    claims = [claim for data in tables for claim in data["claims"]]
    counts = [
        f"{sum(claim['outcome'] == outcome for claim in claims)} {outcome_in_words(outcome)}"
        for outcome in ("reproduced", "refuted", "undecided")
    ]
    scales = ", ".join(sorted({data["scale"] for data in tables}))
    return f'<p class="lead">{escape(", ".join(counts))}. Scale: {escape(scales)}.</p>'


def _notes(data: Mapping[str, Any]) -> str:
    done = f"{seeds_done(data)} seeds; ± is the standard error over seeds."
    return "".join(f'<p class="note">{escape(sentence)}</p>' for sentence in (done, *data["protocol"]))


def _table(data: Mapping[str, Any]) -> str:
    header, rows = table_lines(data)
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<li><strong>{escape(outcome_in_words(claim['outcome']))}</strong>: {escape(claim['text'])}"
        f" <small>{escape(claim['evidence'])} (p = {claim['p_reproduced']:.2g}; {escape(claim['test'])})</small></li>"
        for claim in claims
    )
    return f"<ul>{items}</ul>" if items else ""


def _plot(data: Mapping[str, Any], key: str) -> Plot | None:
    """The figures of a column: a point for each seed, and the mean with its error."""
    rows = [row for row in data["rows"] if key in row["figures"]]
    if not rows:
        return None
    label = next(column["label"] for column in data["columns"] if column["key"] == key)
    figures = [row["figures"][key] for row in rows]

    def draw(axes: Axes) -> None:
        for place, figure in enumerate(figures):
            values = [value for value, _ in figure["seeds"].values()]
            axes.plot(values, [place] * len(values), "o", color=PALETTE[0], alpha=0.4, markersize=4)
        means, errors = [figure["mean"] for figure in figures], [figure["error"] for figure in figures]
        style = {**ERRORBAR_STYLE, "linestyle": "none"}
        axes.errorbar(means, range(len(rows)), xerr=errors, color=PALETTE[1], **style)
        axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel=label)

    table = [(row["label"], figure["mean"], figure["error"]) for row, figure in zip(rows, figures, strict=True)]
    lowest = min(table, key=lambda line: line[1])
    return render_plot(
        f"{data['name']}-{key}",
        f"{label}: a point for each seed, and their mean with its standard error.",
        f"{label} by row; the lowest is {lowest[0]} with {lowest[1]:.4g}.",
        draw,
        ("", label, "standard error"),
        table,
    )
