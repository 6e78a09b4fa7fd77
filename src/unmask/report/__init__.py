"""A run as one self-contained page: what was trained, how well it went, and what the model writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from unmask.data.folders import exclusive, replacing
from unmask.report.contents import Progress, ReportSettings, gather, silent

__all__ = ["ReportSettings", "write_report"]

PAGE, FIGURES = "index.html", "report.json"


def write_report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    settings: ReportSettings = ReportSettings(),  # noqa: B008
    progress: Progress = silent,
) -> Path:
    """Write `index.html`, `report.json` and a PNG of each figure to `out` (`run`/report); returns the page.

    The run may be still going: its newest checkpoint is measured then. An older report is replaced at one
    stroke, and only once the new one is whole. `progress` is told what is being done and how far it is.
    """
    from unmask.report.drawing import require_matplotlib
    from unmask.report.figures import draw_all
    from unmask.report.page import page

    require_matplotlib()
    folder = Path(run) / "report" if out is None else Path(out)
    final = Path(os.path.realpath(folder))  # a link is followed, not replaced
    _check_replaceable(final)
    contents = gather(Path(run), settings, progress)
    with progress("drawing", None, "figures"):
        drawings = draw_all(contents)
    with exclusive(final) as alone, replacing(final, alone) as fresh:
        (fresh / PAGE).write_text(page(contents, drawings), encoding="utf-8")
        data = json.dumps(contents.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        (fresh / FIGURES).write_text(data + "\n", encoding="utf-8")
        for drawing in drawings.values():
            (fresh / f"{drawing.name}.png").write_bytes(drawing.png)
    return folder / PAGE


def _check_replaceable(path: Path) -> None:
    """Only a report is ever overwritten."""
    if not path.exists():
        return
    foreign = [
        entry.name
        for entry in (path.iterdir() if path.is_dir() else [path])
        if entry.name not in (PAGE, FIGURES) and entry.suffix != ".png"
    ]
    if foreign or not (path / FIGURES).is_file():
        what = f"holds {min(foreign)}" if foreign else f"has no {FIGURES}"
        raise ValueError(f"{path} is not a report ({what}), and is left as it is; choose another folder")
