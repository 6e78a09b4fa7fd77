"""The benchmark of the server runs, and counts what it says it counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import serving
from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer, save


def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lm = LanguageModel.from_config(DiTConfig(width=16, depth=1, heads=2, max_length=128), MDLM(), Tokenizer.bytes())
    save(lm, tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["serving", str(tmp_path / "model"), "--quick"])
    serving.main()
    told = capsys.readouterr().out
    assert "100.0% of the texts are the same" in told
    assert told.count("short requests beside long ones") == 2
    ends = [
        (kind, status, int(count))
        for count, kind, status in re.findall(r"([\d,]+) (short|long) (\w+)", told.replace(",", ""))
    ]
    assert sum(count for kind, _, count in ends if kind == "short") == 40
    assert {status for _, status, _ in ends} <= {"200", "504", "gone"}
