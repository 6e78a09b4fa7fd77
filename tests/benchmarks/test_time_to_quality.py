"""Time to quality: every arm is an experiment, and what is measured is the true bound."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import time_to_quality as quality
from benchmarks.time_to_quality import ABLATIONS, apply_arm
from unmask.recipes import RECIPES

SMALL = (
    "backbone.width=16",
    "backbone.depth=1",
    "backbone.heads=2",
    "backbone.max_length=16",
    "layout.length=16",
    "training.batch_size=2",
)


@pytest.mark.parametrize("arm", ["default", "ar", *(f"no-{part}" for part in ABLATIONS)])
def test_every_arm_is_an_experiment(arm: str) -> None:
    base = RECIPES["text8-tiny"]()
    experiment = apply_arm(base, arm, ["backbone.depth=6"])
    assert experiment.backbone.depth == 6
    assert (experiment == apply_arm(base, "default", ["backbone.depth=6"])) == (arm == "default")


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(SystemExit, match="choose default, ar or no-"):
        apply_arm(RECIPES["text8-tiny"](), "no-thing", [])


@pytest.mark.parametrize("arm", ["default", "baseline", "ar"])
def test_a_run_is_measured_and_noted(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    arguments = [str(tmp_path / "train.txt"), str(tmp_path / "test.txt"), "--arm", arm, "--seconds", "0.5"]
    arguments += ["--windows", "8", "--passes", "2", "--folder", str(tmp_path / "out"), "--set", *SMALL]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    monkeypatch.setattr(quality, "current_peak_flops", lambda: 1.0)
    quality.main()
    assert "nats/token" in capsys.readouterr().out
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert 0 < noted["nats"] < 4
    assert noted["steps"] > 0
    assert (noted["error"] == 0) == (arm == "ar")
