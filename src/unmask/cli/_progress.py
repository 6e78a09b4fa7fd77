"""Progress on stderr: a bar on a terminal, lines elsewhere, nothing for work of less than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from unmask.types import ProgressFn

_SHOW_AFTER_SECONDS = 2.0
"""Work that takes less shows no progress."""
_LINE_INTERVAL_SECONDS = 10.0
"""Seconds between lines, where there is no terminal."""


@contextmanager
def progress(what: str, total: int | None, unit: str, quiet: bool = False) -> Iterator[ProgressFn]:
    """A function that reports the amount done so far, of `total` (None if it is not known).

    `what` is the label. Amounts with the unit "bytes" are shown in kB, MB or GB.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        bar = _ProgressBar(what, total, unit)
        try:
            yield bar.report
        finally:
            bar.stop()
    else:
        yield _ProgressLines(what, total, unit).report


@contextmanager
def heartbeat(what: str, quiet: bool = False) -> Iterator[None]:
    """Print the elapsed time every few seconds, for work that cannot report progress."""
    done = Event()

    def print_elapsed() -> None:
        started, pause = time.monotonic(), _SHOW_AFTER_SECONDS
        while not done.wait(pause):
            print(f"{what}: {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)
            pause = _LINE_INTERVAL_SECONDS

    printer = Thread(target=print_elapsed, daemon=True)
    if not quiet:
        printer.start()
    try:
        yield
    finally:
        done.set()
        if not quiet:
            printer.join()


class _ProgressBar:
    """A bar that appears after two seconds, even if nothing was reported until then."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.bar: Progress | None = None
        self.timer = Timer(_SHOW_AFTER_SECONDS, self._show)
        self.timer.daemon = True
        self.timer.start()

    def report(self, done: int) -> None:
        self.done = done
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=_format_amount(done, self.total, self.unit))

    def stop(self) -> None:
        self.timer.cancel()
        self.timer.join()
        if self.bar is not None:
            self.bar.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(self.what),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = bar.add_task("", total=self.total)
        self.bar = bar
        self.report(self.done)  # after self.bar is set, so that no report of the working thread is lost
        bar.start()


class _ProgressLines:
    """A line every ten seconds, at most one per report."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.start = time.monotonic()
        self.next_line = self.start + _SHOW_AFTER_SECONDS

    def report(self, done: int) -> None:
        now = time.monotonic()
        if now < self.next_line:
            return
        self.next_line = now + _LINE_INTERVAL_SECONDS
        text = f"{self.what}: {_format_amount(done, self.total, self.unit)}"
        if self.total is not None and done > 0:
            text += f", about {(now - self.start) * max(0, self.total - done) / done:.0f} s left"
        print(text, file=sys.stderr, flush=True)


def _format_amount(done: int, total: int | None, unit: str) -> str:
    """For example "3 of 12 tokens", "3.0 of 12.5 MB", or "3 tokens" without a total."""
    scale, digits = 1, 0
    if unit == "bytes":
        largest = total or done
        for name, size in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
            if largest >= size:
                scale, unit, digits = size, name, 1
    shown = [f"{number / scale:,.{digits}f}" for number in (done, total) if number is not None]
    return f"{' of '.join(shown)} {unit}"
