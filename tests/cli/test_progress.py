from __future__ import annotations

import io
import sys
import time

import pytest

from unmask.cli import _progress as module
from unmask.cli._progress import _format_amount, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [
        (3, 12, "tokens", "3 of 12 tokens"),
        (1_200, 65_000, "steps", "1,200 of 65,000 steps"),
        (7, None, "tokens", "7 tokens"),
        (300, 999, "bytes", "300 of 999 bytes"),
        (300_000, 12_500_000, "bytes", "0.3 of 12.5 MB"),
        (1_999_000_000, None, "bytes", "2.0 GB"),
        (0, None, "bytes", "0 bytes"),
    ],
)
def test_amounts(done: int, total: int | None, unit: str, text: str) -> None:
    assert _format_amount(done, total, unit) == text


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", 3, "tokens") as report:
        for done in (1, 2, 3):
            report(done)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 1.9, 2.1, 12.0, 12.2])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress("working", 100, "tokens") as report:
        for done in (10, 20, 30, 61):
            report(done)
    assert capsys.readouterr() == (
        "",
        "working: 20 of 100 tokens, about 8 s left\nworking: 61 of 100 tokens, about 8 s left\n",
    )


def test_without_a_total_nobody_guesses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_SHOW_AFTER_SECONDS", 0.0)
    with progress("working", None, "bytes") as report:
        report(5)
    assert capsys.readouterr().err == "working: 5 bytes\n"


def test_quiet_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "_SHOW_AFTER_SECONDS", 0.0)
    with progress("working", 3, "tokens", quiet=True) as report:
        report(1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_even_before_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module, "_SHOW_AFTER_SECONDS", 0.01)
    with progress("working", 40, "tokens") as report:
        deadline = time.monotonic() + 20
        while "0 of 40 tokens" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        report(30)
    shown = terminal.getvalue()
    assert "0 of 40 tokens" in shown
    assert "30 of 40 tokens" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # it clears up behind itself


def test_short_work_draws_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("working", 40, "tokens") as report:
        report(30)
    assert terminal.getvalue() == ""
