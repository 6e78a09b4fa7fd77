"""A page that loads nothing from elsewhere, and figures on it.

All text from data passes through `escape`. Should that ever fail, a content security policy allows the page's own
script only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from unmask.report._plotting import Plot
from unmask.report.formatting import MISSING_VALUE, format_cell


def html_page(title: str, body: str, footer: str, *, script: str = "", style: str = "") -> str:
    """The HTML document with this body, in the style of all reports and `style`."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"; script-src 'sha256-{digest}'" if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{allowed}"
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8") + style
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<footer>{escape(footer)}</footer>
</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def section_html(name: str, title: str, body: str) -> str:
    """A section with its heading."""
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{body}</section>'


def figures_html(plots: Sequence[Plot], kind: str = "figures") -> str:
    """Plots side by side, each with its caption and its numbers."""
    return f'<div class="{kind}">{"".join(map(_figure, plots))}</div>' if plots else ""


def _figure(plot: Plot) -> str:
    svg = plot.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.alt)}" ', 1)
    numbers = ""
    if plot.table:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in plot.columns)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(format_cell(value))}</td>' for value in row)}</tr>" for row in plot.table
        )
        numbers = (
            f'<details><summary>The numbers</summary><div class="scroll"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
    return f'<figure id="figure-{plot.name}">{svg}{caption}{numbers}</figure>'


def cards_html(metrics: Iterable[tuple[str, str, str]], kind: str) -> str:
    """Figures in large type: a label, a value and its error each."""
    cards = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}"
        f"{f' <small>{escape(error)}</small>' if error else ''}</dd></div>"
        for label, value, error in metrics
    )
    return f'<dl class="{kind}">{cards}</dl>'


def table_html(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, a line each."""
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>' for name, value in rows
    )
    return f'<div class="scroll"><table class="plain"><tbody>{lines}</tbody></table></div>'


def flatten_settings(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines: training.optimizer is AdamW, training.optimizer.lr is 0.001, ..."""
    if isinstance(value, dict):
        kind = [(path or "kind", str(value["kind"]))] if "kind" in value else []
        return kind + [
            line
            for key, item in value.items()
            if key != "kind"
            for line in flatten_settings(item, f"{path}.{key}".lstrip("."))
        ]
    if isinstance(value, list):
        return [(path, ", ".join(map(str, value)))]
    return [(path, MISSING_VALUE if value is None else str(value))]
