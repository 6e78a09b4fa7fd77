"""What a run says: `metrics.jsonl` and trackers; a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from unmask.data.folders import replacing_file
from unmask.training.trackers import AnyTracker, Tracker

HELD_OUT, ITS_ERROR = "valid_nats_per_token", "valid_standard_error"
"""The figures of an evaluation that are told as one."""


class Log:
    """Figures of a run, to a file and to people; `quiet` on ranks that do not speak for all."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        resumed_at: int,
        quiet: bool = False,
        trackers: tuple[AnyTracker, ...] = (),
    ) -> None:
        self.path, self.steps, self.quiet = folder / "metrics.jsonl", steps, quiet
        self.wanted, self.trackers = trackers, dict[str, Tracker]()
        self.file: Any = None
        self.bar: Progress | None = None
        self.resumed_at, self.started = resumed_at, time.monotonic()

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        self._forget_after(self.resumed_at)
        self.file = self.path.open("ab", buffering=0)  # what does not fit is told now, and not on closing
        for tracker in self.wanted:
            self.trackers[type(tracker).__name__] = tracker.open(self.path.parent, self.resumed_at)
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps, completed=self.resumed_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        self._tell_trackers(lambda tracker: tracker.close())
        if self.file is not None:
            self.file.close()

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Every now and then: loss, speed, time left."""
        self._write(step, figures)
        text = f"loss {figures['loss']:.3f}, {figures['tokens_per_second']:,.0f} tokens/s"
        if share := figures.get("peak_share"):
            text += f", {share:.0%} of peak"
        text += f", {self._time_left(step)} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self.steps}: {text}")

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Figures of the held-out text, if there is any."""
        if not figures:
            return
        self._write(step, figures)
        told = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items()]
        if HELD_OUT in figures and ITS_ERROR in figures:
            others = {n: v for n, v in figures.items() if n not in (HELD_OUT, ITS_ERROR)}
            told = [f"held out: {figures[HELD_OUT]:.3f} ± {figures[ITS_ERROR]:.3f} nats/token"]
            told += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in others.items()]
        self.say(f"step {step}: {', '.join(told)}")

    def bad_step(self, step: int, loss: float, gradient: float) -> None:
        """A step that was not taken, because something was not finite."""
        self._record({"step": step, "bad_batch": step - 1, "loss": repr(loss), "gradient": repr(gradient)})
        self.say(
            f"step {step} was skipped: loss {loss}, gradient {gradient} (batch {step - 1} of the data order)"
        )

    def say(self, text: str) -> None:
        """A line for people."""
        if self.quiet:
            return
        if self.bar is not None:
            self.bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        self._record({"step": step, **figures})
        self._tell_trackers(lambda tracker: tracker.write(step, figures))

    def _tell_trackers(self, tell: Callable[[Tracker], None]) -> None:
        """A tracker that fails, whatever the reason, is left out from then on; the run goes on."""
        for name, tracker in list(self.trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                del self.trackers[name]
                self.say(f"{name} failed and gets no more figures; {self.path.name} does. It said: {error}")

    def _time_left(self, step: int) -> str:
        """At the mean speed of this process so far, evaluations and saves included."""
        taken = time.monotonic() - self.started
        return duration(taken / (step - self.resumed_at) * (self.steps - step))

    def _record(self, figures: dict[str, Any]) -> None:
        if self.file is None:
            return
        try:
            self.file.write((json.dumps(figures) + "\n").encode())
        except OSError as error:  # which does not know the file's name
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that the run goes on from, and lines that are broken."""
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        kept = [line + b"\n" for line in lines if (of := _step_of(line)) is not None and of <= step]
        with replacing_file(self.path) as fresh:
            fresh.write_bytes(b"".join(kept))


def _step_of(line: bytes) -> int | None:
    """The step that a line is about; None if it was torn or damaged."""
    try:
        figures = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = figures.get("step") if isinstance(figures, dict) else None
    return step if isinstance(step, int) else None


def last_evaluation(folder: Path) -> tuple[int, float, float] | None:
    """The step, the nats per token and their standard error of a run's last evaluation, if there was one."""
    path, found = folder / "metrics.jsonl", None
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        if b"valid_nats_per_token" in line and (step := _step_of(line)) is not None:
            figures = json.loads(line)
            nats, error = figures["valid_nats_per_token"], figures.get("valid_standard_error", 0.0)
            if all(isinstance(each, int | float) and math.isfinite(each) for each in (nats, error)):
                found = (step, float(nats), float(error))
    return found


def duration(seconds: float) -> str:
    """Seconds as people say them, in two units at most: 45 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {smaller}"
    return f"{whole} s"
