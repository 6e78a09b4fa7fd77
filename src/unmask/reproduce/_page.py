"""The page of a reproduction: tables, plots and verdicts in one file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from unmask.report import ERRORBAR_STYLE, PALETTE, Plot, figures_html, html_page, render_plot, section_html
from unmask.reproduce._results import outcome_in_words, seeds_done, table_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def render_tables(tables: Sequence[Mapping[str, Any]]) -> str:
    """The HTML document of tables as `table_to_json` gives them."""
    sections = [_summary(tables)]
    for data in tables:
        curve = data["plots"]["curve"]
        drawn = [_plot_curve(data, *curve)] if curve else []
        drawn += [_plot(data, key) for key in data["plots"]["columns"]]
        plots = [plot for plot in drawn if plot is not None]
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


def _label(data: Mapping[str, Any], key: str) -> str:
    label: str = next(column["label"] for column in data["columns"] if column["key"] == key)
    return label


def _plot_curve(data: Mapping[str, Any], x: str, y: str) -> Plot | None:
    """A column against another, a line for each method, with errors of the second."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        if {x, y} <= set(row["figures"]):
            method, word = row["label"].partition(",")[0], row["key"].rpartition("-")[0]
            curves.setdefault(method if word else row["label"], []).append(row["figures"])
    if not curves:
        return None
    x_label, y_label = _label(data, x), _label(data, y)

    def draw(axes: Axes) -> None:
        for number, (name, points) in enumerate(curves.items()):
            across, up = ([point[key]["mean"] for point in points] for key in (x, y))
            errors = [point[y]["error"] for point in points]
            axes.errorbar(across, up, yerr=errors, color=PALETTE[number], label=name, **ERRORBAR_STYLE)
        axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        axes.legend()

    table = [(name, p[x]["mean"], p[y]["mean"], p[y]["error"]) for name, points in curves.items() for p in points]
    return render_plot(
        f"{data['name']}-{x}-{y}",
        f"{y_label} against {x_label}, a line for each method.",
        f"{y_label} against {x_label}: " + "; ".join(f"{name} {line[1]:.4g}" for name, *line in table) + ".",
        draw,
        ("", x_label, y_label, "standard error"),
        table,
    )


def _plot(data: Mapping[str, Any], key: str) -> Plot | None:
    """The figures of a column: a point for each seed, and the mean with its error."""
    rows = [row for row in data["rows"] if key in row["figures"]]
    if not rows:
        return None
    label = _label(data, key)
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
