"""A run as one self-contained page: what was trained, how well it went, and what the model writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock
from unmask.report.collect import ProgressContext, ReportConfig, collect, no_progress

__all__ = ["ReportConfig", "write_report"]

_HTML_FILE, _JSON_FILE = "index.html", "report.json"


def write_report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    config: ReportConfig = ReportConfig(),  # noqa: B008
    progress: ProgressContext = no_progress,
) -> Path:
    """Write `index.html`, `report.json` and a PNG of each figure to `out` (`run`/report); returns the page.

    The run may be still going: its newest checkpoint is measured then. An older report is replaced at one
    stroke, and only once the new one is whole. `progress` is told what is being done and how far it is.
    """
    from unmask.report.html import render_page
    from unmask.report.plots import make_plots
    from unmask.report.plotting import require_matplotlib

    require_matplotlib()
    folder = Path(run) / "report" if out is None else Path(out)
    final = Path(os.path.realpath(folder))  # a link is followed, not replaced
    _check_replaceable(final)
    contents = collect(Path(run), config, progress)
    with progress("drawing", None, "figures"):
        drawings = make_plots(contents)
    with file_lock(final) as alone, atomic_folder(final, alone) as fresh:
        (fresh / _HTML_FILE).write_text(render_page(contents, drawings), encoding="utf-8")
        data = json.dumps(contents.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        (fresh / _JSON_FILE).write_text(data + "\n", encoding="utf-8")
        for drawing in drawings.values():
            (fresh / f"{drawing.name}.png").write_bytes(drawing.png)
    return folder / _HTML_FILE


def _check_replaceable(path: Path) -> None:
    """Only a report is ever overwritten."""
    if not path.exists():
        return
    foreign = [
        entry.name
        for entry in (path.iterdir() if path.is_dir() else [path])
        if entry.name not in (_HTML_FILE, _JSON_FILE) and entry.suffix != ".png"
    ]
    if foreign or not (path / _JSON_FILE).is_file():
        what = f"holds {min(foreign)}" if foreign else f"has no {_JSON_FILE}"
        raise ValueError(f"{path} is not a report ({what}), and is left as it is; choose another folder")
