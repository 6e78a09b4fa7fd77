"""A self-contained HTML page about a run: its settings, its curves, what its model scores and generates."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock
from unmask.registry import AllowCode
from unmask.report._page import figures_html, html_page, section_html
from unmask.report._plotting import ERRORBAR_STYLE, PALETTE, Plot, log2_axis, log_axis, render_plot, require_matplotlib
from unmask.report.config import ReportConfig

if TYPE_CHECKING:
    from unmask.report._measure import ProgressContext

__all__ = [
    "ERRORBAR_STYLE",
    "PALETTE",
    "Plot",
    "ReportConfig",
    "figures_html",
    "html_page",
    "log2_axis",
    "log_axis",
    "render_plot",
    "require_matplotlib",
    "section_html",
    "write_report",
]

_HTML_FILE, _JSON_FILE = "index.html", "report.json"


def write_report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    config: ReportConfig = ReportConfig(),  # noqa: B008
    progress: ProgressContext | None = None,
    *,
    allow_code: AllowCode = False,
) -> Path:
    """Write `index.html`, `report.json` and a PNG of each figure to `out` (`run`/report); returns the page.

    A run is one of `unmask train`, or of `unmask classify train`. If the former is not finished, its latest checkpoint
    is measured. An older report is replaced atomically, once the new one is complete. `progress` shows each part of
    the work.
    """
    require_matplotlib()
    folder = Path(run) / "report" if out is None else Path(out)
    final = Path(os.path.realpath(folder))  # a link is followed, not replaced
    _check_replaceable(final)
    page, data, plots = _make_page(Path(run), config, progress, allow_code)
    with file_lock(final) as lock, atomic_folder(final, lock) as folder_in_progress:
        (folder_in_progress / _HTML_FILE).write_text(page, encoding="utf-8")
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
        (folder_in_progress / _JSON_FILE).write_text(text + "\n", encoding="utf-8")
        for plot in plots.values():
            (folder_in_progress / f"{plot.name}.png").write_bytes(plot.png)
    return folder / _HTML_FILE


def _make_page(
    run: Path, config: ReportConfig, progress: ProgressContext | None, allow_code: AllowCode
) -> tuple[str, dict[str, Any], dict[str, Plot]]:
    """The HTML document of a run, its data and its plots: of a language model, or of a classifier."""
    from unmask.report._classification import classification_page, is_classification_run
    from unmask.report._html import render_page
    from unmask.report._measure import measure_run, no_progress
    from unmask.report._plots import make_plots

    if is_classification_run(run):
        return classification_page(run)
    progress = progress or no_progress
    found = measure_run(run, config, progress, allow_code=allow_code)
    with progress("plots", None, "plots"):
        plots = make_plots(found)
    return render_page(found, plots), found.to_json(), plots


def _check_replaceable(path: Path) -> None:
    """Refuse to overwrite a folder that is not a report."""
    if not path.exists():
        return
    foreign = [
        entry.name
        for entry in (path.iterdir() if path.is_dir() else [path])
        if entry.name not in (_HTML_FILE, _JSON_FILE) and entry.suffix != ".png"
    ]
    if foreign or not (path / _JSON_FILE).is_file():
        what = f"holds {min(foreign)}" if foreign else f"has no {_JSON_FILE}"
        raise ValueError(f"{path} is not a report ({what}); choose another folder")
