"""What people read while a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from unmask.training.logger import TrainingLogger, format_duration


def test_durations() -> None:
    said = [format_duration(s) for s in (0.4, 59.4, 59.6, 200, 7500, 86400 * 3 + 4 * 3600)]
    assert said == ["0 s", "59 s", "1 min 00 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"]


def test_a_line_has_loss_speed_share_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 130.0])
    monkeypatch.setattr("unmask.training.logger.time.monotonic", lambda: next(clock))
    with TrainingLogger(tmp_path, 100, 40) as log:
        log.log_step(50, {"loss": 5.4321, "tokens_per_second": 12345.6, "mfu": 0.314})
    # Ten steps of this process took 30 s, so fifty take 150.
    expected = "step 50/100: loss 5.432, 12,346 tokens/s, 31% of peak, 2 min 30 s left\n"
    assert capsys.readouterr().err == expected
    assert '"mfu": 0.314' in (tmp_path / "metrics.jsonl").read_text()


def test_an_evaluation_reads_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingLogger(tmp_path, 100, 0) as log:
        log.log_evaluation(50, {"valid_nats_per_token": 5.32123, "valid_standard_error": 0.0123, "new_ones": 2})
        log.log_evaluation(60, {"figure": 1.0})
        log.log_evaluation(70, {})
    expected = "step 50: held out: 5.321 ± 0.012 nats/token, new ones 2\nstep 60: figure 1\n"
    assert capsys.readouterr().err == expected
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_terminal_gets_a_bar_with_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    with TrainingLogger(tmp_path, 100, 0) as log:
        log.log_step(50, {"loss": 5.4321, "tokens_per_second": 12345.6, "mfu": 0.314})
    told = capsys.readouterr().err
    assert "50/100" in told
    assert "loss 5.432, 12,346 tokens/s, 31% of peak, 0 s left" in told
