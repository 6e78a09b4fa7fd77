"""How far long work has come, on stderr: a bar on a terminal, lines elsewhere, nothing for short work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_SHOW_AFTER_SECONDS = 2.0
"""Seconds of silence: work that takes less needs no bar."""
_LINE_INTERVAL_SECONDS = 10.0
"""Seconds between plain lines."""

_ProgressFn = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None, unit: str, quiet: bool = False) -> Iterator[_ProgressFn]:
    """A function to tell how much of the `total` is done by now; None if the total is not known.

    Those who work call it when they like, and know nothing of terminals. `unit` bytes gets kB, MB and GB.
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
    """For work that cannot say how far it is: how long it has taken, now and then."""
    done = Event()

    def print_elapsed() -> None:
        started, pause = time.monotonic(), _SHOW_AFTER_SECONDS
        while not done.wait(pause):
            print(f"{what}: {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)
            pause = _LINE_INTERVAL_SECONDS

    teller = Thread(target=print_elapsed, daemon=True)
    if not quiet:
        teller.start()
    try:
        yield
    finally:
        done.set()
        if not quiet:
            teller.join()


class _ProgressBar:
    """Appears after a while even if nothing was reported: the first part of the work may be the longest."""

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
        self.report(self.done)  # in this order no report is lost: another thread is working meanwhile
        bar.start()


class _ProgressLines:
    """A line now and then, when there is something to report."""

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
    """Such as 3 of 12 tokens, 3.0 of 12.5 MB, or 3 tokens if there is no total."""
    scale, digits = 1, 0
    if unit == "bytes":
        largest = total or done
        for name, size in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
            if largest >= size:
                scale, unit, digits = size, name, 1
    shown = [f"{number / scale:,.{digits}f}" for number in (done, total) if number is not None]
    return f"{' of '.join(shown)} {unit}"
