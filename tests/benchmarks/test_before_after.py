"""Two versions take turns in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import before_after
from benchmarks.before_after import ROOT, Comparison, _attribute, _model, measure


@pytest.mark.slow
def test_a_case_is_measured_in_two_source_trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second one has sizes of its own, as another version may."""
    for folder in ("src", "benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    program = tmp_path / "program.py"
    small = "ModelSize(vocab=29, depth=1, width=16, length=8, heads=2)"
    program.write_text(
        "from benchmarks import before_after, training\n"
        "from examples.mdlm_reference import ModelSize\n"
        f"training.WORDS = training.CHARACTERS = {small}\n"
        "before_after.main()\n"
    )
    monkeypatch.setattr(before_after, "__file__", str(program))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for case in ("training words", "sampling characters", "scoring words"):
        seconds, memory = measure(case, ROOT, tmp_path, repeats=2)
        assert len(seconds.ratios) == 2
        assert min(seconds.before + seconds.after) > 0
        assert 50 < memory.before[0] < 10_000


def test_ratios_are_those_of_pairs() -> None:
    comparison = Comparison("training", "s", (2.0, 4.0, 1.0), (1.0, 4.0, 2.0))
    assert comparison.ratios == [0.5, 1.0, 2.0]
    assert str(comparison).endswith("1.000 (0.500 to 2.000)")


def test_names_of_earlier_versions_come_last() -> None:
    assert _attribute("benchmarks.nothing:at_all", "benchmarks.before_after:_model") is _model
    with pytest.raises(SystemExit, match="has none of"):
        _attribute("benchmarks.nothing:at_all", "unmask:nothing")


def test_an_earlier_version_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        before_after.main([])
    assert "which commit" in capsys.readouterr().err
