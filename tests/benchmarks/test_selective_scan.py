"""The benchmark's scans are the same function."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import selective_scan as benchmark


def test_the_compared_scans_agree_and_the_tables_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--repeats", "1", "--threads", "1", "--length", "64", "--longest", "1024", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["selective_scan", *arguments])
    benchmark.main()
    printed = capsys.readouterr().out
    assert "published" in printed
    assert "of all states" in printed
    assert (tmp_path / "scan.png").exists()
