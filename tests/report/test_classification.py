"""The report of a classifier: of one run and of several, true to their numbers, and safe with any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labelled import experiment, letter_rows, tiny_folder, write_csv
from unmask.classification import run_many
from unmask.report import write_report
from unmask.report._classification import classification_page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run in `one`, two in `two`; a label that must be escaped."""
    folder = tmp_path_factory.mktemp("runs")
    model = tiny_folder(folder / "model")
    rows = [[text, HOSTILE if label == "yes" else "no"] for text, label in letter_rows(40)]
    table = write_csv(folder / "rows.csv", ["text", "label"], rows)
    settings = experiment(model, table, table, validation_fraction=0.2, epochs=2)
    run_many({"seed-3": settings}, folder / "one")
    run_many({f"seed-{seed}": settings.with_seed(seed) for seed in (1, 2)}, folder / "two")
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_report_has_figures_confusion_and_curves(name: str, runs: Path) -> None:
    page = write_report(runs / name)
    text = page.read_text(encoding="utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    stored = json.loads((page.parent / "report.json").read_text())
    results = json.loads((runs / name / "results.json").read_text())
    mean = stored["summaries"]["test"]["accuracy"]["mean"]
    if name == "one":
        assert mean == pytest.approx(results["evaluations"]["test"]["metrics"]["accuracy"]["value"])
        assert "95 % interval" in text
    else:
        assert mean == pytest.approx(results["summaries"]["test"]["accuracy"]["mean"])
        assert "standard error of the mean over the runs" in text
    images = {path.stem for path in page.parent.glob("*.png")}
    assert images == {
        *("confusion-test", "training-loss", "valid-loss", "valid-accuracy", "valid-f1", "valid-matthews")
    }
    assert all(f'id="figure-{image}"' in text for image in images)


def test_confusion_matrices_of_several_runs_are_added_up(runs: Path) -> None:
    _, data, plots = classification_page(runs / "two")
    total = sum(int(cell) for row in plots["confusion-test"].table for cell in row[1:])  # type: ignore[arg-type]
    assert total == 2 * 40
    assert len(data["runs"]) == 2


def test_a_run_without_results_is_refused(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_bytes((runs / "one" / "experiment.json").read_bytes())
    with pytest.raises(ValueError, match="has no results yet: give its command again"):
        write_report(tmp_path / "run")
    (tmp_path / "run" / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results.json is damaged: KeyError 'seed'"):
        write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "report").exists()
