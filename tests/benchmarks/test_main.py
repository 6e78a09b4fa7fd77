"""`make bench`: a table, figures as JSON, and a plot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks.sampling_scaling import AXES, Point, _measure_point
from benchmarks.side_by_side import Result
from benchmarks.startup import Startup

TOY = Result("a toy", "float32", (3.0, 4.0), (1.0, 2.0), peak_fraction=0.5)


def test_figures_are_shown_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [asdict(Point(axis, value, 1.0, 2.0, 3, 4)) for axis, values in AXES.items() for value in values]
    monkeypatch.setattr(program, "COMPARISONS", {"toy": lambda: TOY})
    extras = {"scaling": lambda: points, "startup": lambda: asdict(Startup((2.0,), (1.5,), (0.1,)))}
    monkeypatch.setattr(program, "EXTRAS", extras)
    monkeypatch.setattr(program, "_matmul_peaks", lambda: {"float32": 1e9})
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path / "out")])
    program.main()
    shown = capsys.readouterr()
    assert "a toy" in shown.out
    assert "2.5x" in shown.out
    assert "`import torch` 1.50 s" in shown.out
    figures = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert figures["results"]["toy"]["ratios"] == [3.0, 2.0]
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_is_asked_for_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "COMPARISONS", {"toy": lambda: TOY, "other": lambda: 1 / 0})
    monkeypatch.setattr(program, "EXTRAS", {})
    monkeypatch.setattr(program, "_matmul_peaks", dict)
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), "--only", "toy"])
    program.main()
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path), "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "nothing is called nothing; there are toy, other" in capsys.readouterr().err


@pytest.mark.parametrize("axis", list(AXES))
def test_a_point_of_each_axis(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sampling_scaling.SIZE", program.scaling.ModelSize(9, 1, 16, 8, heads=2))
    point = _measure_point(axis, 8)
    assert point.nfe <= 8
    assert point.num_queries == (8 if axis == "batch" else 4) * 8
    assert point.ours > 0
    assert point.baseline > 0
