"""The report of a run as one HTML file; all text from data passes through `escape`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files

from unmask.report._measure import ReportData
from unmask.report._page import cards_html, figures_html, flatten_settings, html_page, section_html, table_html
from unmask.report._plotting import Plot
from unmask.report._sample_html import palette_css, samples_section
from unmask.report.formatting import MISSING_VALUE, format_with_error, human_count
from unmask.training.logger import format_duration


def render_page(data: ReportData, plots: Mapping[str, Plot]) -> str:
    """The HTML document."""
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    body = "\n".join(
        [
            _header_section(data),
            _headline_section(data),
            _training_section(plots),
            _validation_section(data, plots),
            _sample_evals_section(plots),
            samples_section(data.samples, data.sampler),
            _settings_section(data),
            _provenance_section(data),
        ]
    )
    footer = "All numbers of this page are in report.json, and all plots are PNG files in the same folder."
    return html_page(data.name, body, footer, script=script, style=palette_css())


def _header_section(data: ReportData) -> str:
    network = ", ".join(map(str, data.network.values()))
    status = data.status
    sources = ", ".join(map(str, data.settings.get("sources", ())))
    what = f"{data.objective}, {network}, trained on {sources}."
    learned = "".join(f'<p class="note">{escape(f"{name}: {what}")}</p>\n' for name, what in data.learned.items())
    sentence = f'<p class="{"lead" if status.finished else "unfinished"}">{escape(status.sentence)}</p>'
    return f"""<header>
<p class="over">Report of a run</p>
<h1>{escape(data.name)}</h1>
<p class="lead">{escape(what)}</p>
{sentence}
{learned}</header>"""


def _headline_section(data: ReportData) -> str:
    figures = data.headline
    estimates = [
        ("Held-out bits per byte", "bits_per_byte", "bits_per_byte_error"),
        ("Held-out nats per token", "nats_per_token", "standard_error"),
        ("Held-out perplexity", "perplexity", "perplexity_error"),
    ]
    first = []
    for label, name, error in estimates:
        value, error_text = format_with_error(figures[name], figures[error])
        first.append((label, value, error_text or ("" if figures[name] is None else "exact")))
    seconds, speed = figures["training_seconds"], figures["tokens_per_second"]
    second = [
        ("Parameters", human_count(data.num_parameters), ""),
        ("Tokens seen", human_count(data.curves.tokens_seen), ""),
        ("Time in training", MISSING_VALUE if seconds is None else format_duration(seconds), ""),
        ("Tokens per second", MISSING_VALUE if speed is None else human_count(speed), ""),
        ("Steps skipped", f"{data.curves.num_skipped:,}", ""),
    ]
    held_out = data.validation
    note = escape(data.why_no_step_bounds or "")
    if held_out is not None:
        note = (
            f"On {held_out['tokens']:,} held-out tokens."
            " ± is the standard error from the draws of times and masks, given this text."
        )
        if not held_out.get("by_time"):  # without times there is no noise: the likelihood is exact
            note = f"On {held_out['tokens']:,} held-out tokens; exact, as the model is autoregressive."
    return section_html(
        "figures",
        "In figures",
        f'{cards_html(first, "headline first")}{cards_html(second, "headline")}<p class="note">{note}</p>',
    )


def _training_section(plots: Mapping[str, Plot]) -> str:
    small = [plots[name] for name in ("lr_factor", "grad_norm", "throughput") if name in plots]
    if "loss" not in plots:
        return section_html("training", "Training", '<p class="note">Nothing has been logged yet.</p>')
    body = figures_html([plots["loss"]], "figures") + figures_html(small, "figures small")
    return section_html("training", "Training", body)


def _validation_section(data: ReportData, plots: Mapping[str, Plot]) -> str:
    shown = [plots[name] for name in ("by-time", "steps") if name in plots]
    reasons = []
    if "by-time" not in plots and data.validation is not None:
        reasons.append("The model has no time, so there are no nats by time.")
    if data.why_no_step_bounds is not None:
        reasons.append(data.why_no_step_bounds)
    notes = "".join(f'<p class="note">{escape(reason)}</p>' for reason in reasons)
    return section_html(
        "likelihood", "Nats by time, and the cost of fewer steps", notes + figures_html(shown, "figures")
    )


def _sample_evals_section(plots: Mapping[str, Plot]) -> str:
    shown = [each for name, each in plots.items() if name.startswith("samples-")]
    return section_html("sample_evals", "Evaluated samples", figures_html(shown, "figures")) if shown else ""


def _settings_section(data: ReportData) -> str:
    table = table_html(flatten_settings(data.settings))
    return section_html("settings", "Settings", f"<details><summary>All settings</summary>{table}</details>")


def _provenance_section(data: ReportData) -> str:
    return section_html("provenance", "Provenance", table_html(flatten_settings(data.provenance)))
