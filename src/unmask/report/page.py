"""The page: one HTML file that asks nobody for anything.

All text that comes from data passes `escape`; a content security policy lets the page's own script run
and nothing else, should that ever fail.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from unmask.report.contents import Contents
from unmask.report.drawing import Drawing
from unmask.report.revealed import palette_css, samples_section
from unmask.report.wording import MISSING, amount, cell, with_error
from unmask.training.log import duration


def page(contents: Contents, drawings: Mapping[str, Drawing]) -> str:
    """The whole document."""
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8") + palette_css()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = "\n".join(
        [
            _header(contents),
            _headline(contents),
            _training(drawings),
            _held_out(contents, drawings),
            _judged(drawings),
            samples_section(contents.samples, contents.sampler),
            _settings(contents),
            _provenance(contents),
        ]
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(contents.name)}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<footer>Every figure of this page is in report.json beside it; the drawings are there as PNG, too.</footer>
</main>
<script>{script}</script>
</body>
</html>
"""


def _header(contents: Contents) -> str:
    network = contents.settings.get("backbone", {})
    shape = f"{network.get('depth')} layers of {network.get('width')}, {network.get('length')} tokens at once"
    status = contents.status
    sources = ", ".join(map(str, contents.settings.get("sources", ())))
    what = f"{contents.objective}, {shape}, trained on {sources}."
    sentence = f'<p class="{"lead" if status.finished else "unfinished"}">{escape(status.sentence)}</p>'
    return f"""<header>
<p class="over">Report of a run</p>
<h1>{escape(contents.name)}</h1>
<p class="lead">{escape(what)}</p>
{sentence}
</header>"""


def _headline(contents: Contents) -> str:
    figures = contents.headline
    estimates = [
        ("Held-out bits per byte", "bits_per_byte", "bits_per_byte_error"),
        ("Held-out nats per token", "nats_per_token", "standard_error"),
        ("Held-out perplexity", "perplexity", "perplexity_error"),
    ]
    first = []
    for label, name, error in estimates:
        value = figures[name]
        shown = (MISSING, "") if value is None else with_error(value, figures[error] or 0.0)
        first.append((label, *shown))
    seconds, speed = figures["training_seconds"], figures["tokens_per_second"]
    second = [
        ("Parameters", amount(contents.parameters), ""),
        ("Tokens seen", amount(contents.curves.tokens_seen), ""),
        ("Time in training", MISSING if seconds is None else duration(seconds), ""),
        ("Tokens per second", MISSING if speed is None else amount(speed), ""),
        ("Steps skipped", f"{contents.curves.skipped:,}", ""),
    ]
    held_out = contents.held_out
    note = "No text was held out, so there is no likelihood to tell."
    if held_out is not None:
        note = (
            f"On {held_out['tokens']:,} held-out tokens."
            " ± is the standard error from the draws of times and masks, given this text."
        )
        if not held_out.get("by_time"):  # a likelihood that is not spread over times is no estimate
            note = f"On {held_out['tokens']:,} held-out tokens; exact, as the model is autoregressive."
    return _section(
        "figures",
        "In figures",
        f'{_cards(first, "headline first")}{_cards(second, "headline")}<p class="note">{note}</p>',
    )


def _cards(entries: Iterable[tuple[str, str, str]], kind: str) -> str:
    cards = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}"
        f"{f' <small>{escape(error)}</small>' if error else ''}</dd></div>"
        for label, value, error in entries
    )
    return f'<dl class="{kind}">{cards}</dl>'


def _training(drawings: Mapping[str, Drawing]) -> str:
    small = [drawings[name] for name in ("learning-rate", "gradient", "speed") if name in drawings]
    if "loss" not in drawings:
        return _section("training", "Training", '<p class="note">Nothing has been logged yet.</p>')
    body = _figures([drawings["loss"]], "figures") + _figures(small, "figures small")
    return _section("training", "Training", body)


def _held_out(contents: Contents, drawings: Mapping[str, Drawing]) -> str:
    shown = [drawings[name] for name in ("by-time", "steps") if name in drawings]
    reasons = []
    if "by-time" not in drawings and contents.held_out is not None:
        reasons.append("The model has no time, so there is nothing to tell apart by it.")
    if contents.no_step_bounds is not None:
        reasons.append(contents.no_step_bounds)
    notes = "".join(f'<p class="note">{escape(reason)}</p>' for reason in reasons)
    return _section(
        "likelihood", "Where the nats are, and what steps cost", notes + _figures(shown, "figures")
    )


def _judged(drawings: Mapping[str, Drawing]) -> str:
    shown = [each for name, each in drawings.items() if name.startswith("judge-")]
    return _section("judged", "Samples, judged", _figures(shown, "figures")) if shown else ""


def _figures(drawings: Sequence[Drawing], kind: str) -> str:
    return f'<div class="{kind}">{"".join(map(_figure, drawings))}</div>' if drawings else ""


def _figure(drawing: Drawing) -> str:
    svg = drawing.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.alt)}" ', 1)
    numbers = ""
    if drawing.table:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in drawing.columns)
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in row)}</tr>" for row in drawing.table
        )
        numbers = (
            f'<details><summary>The numbers</summary><div class="scroll"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>"
        )
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>"
    return f'<figure id="figure-{drawing.name}">{svg}{caption}{numbers}</figure>'


def _settings(contents: Contents) -> str:
    table = _table(_flat(contents.settings))
    return _section("settings", "Settings", f"<details><summary>All settings</summary>{table}</details>")


def _provenance(contents: Contents) -> str:
    return _section("provenance", "Provenance", _table(_flat(contents.provenance)))


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(value)}</code></td></tr>'
        for name, value in rows
    )
    return f'<div class="scroll"><table class="plain"><tbody>{lines}</tbody></table></div>'


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Nested settings as lines: training.optimizer is AdamW, training.optimizer.lr is 0.001, ..."""
    if isinstance(value, dict):
        own = [(path or "kind", str(value["kind"]))] if "kind" in value else []
        return own + [
            line
            for key, item in value.items()
            if key != "kind"
            for line in _flat(item, f"{path}.{key}".lstrip("."))
        ]
    if isinstance(value, list):
        return [(path, ", ".join(map(str, value)))]
    return [(path, MISSING if value is None else str(value))]


def _section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{body}</section>'
