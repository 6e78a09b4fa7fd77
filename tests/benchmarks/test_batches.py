"""The benchmark of files of requests runs, and both sides give the same texts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import batches
from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer, save


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lm = LanguageModel.from_config(DiTConfig(width=16, depth=1, heads=2, max_length=128), MDLM(), Tokenizer.bytes())
    save(lm, tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["batches", str(tmp_path / "model"), "--quick"])
    batches.main()
    assert "100.0% of the texts are the same" in capsys.readouterr().out


def test_tokens_are_those_of_the_holes() -> None:
    assert batches.num_tokens([{"template": "a<mask:3>b<mask:12>"}, {"template": "<mask:1>"}]) == 16
