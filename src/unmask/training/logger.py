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

from unmask.io.atomic import atomic_file
from unmask.training.trackers import AnyTracker, Tracker

_VALID_NATS, _VALID_ERROR = "valid_nats_per_token", "valid_standard_error"
"""The figures of an evaluation that are told as one."""


class TrainingLogger:
    """Figures of a run, to a file and to people; `quiet` on ranks that do not speak for all."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        resumed_at: int,
        quiet: bool = False,
        trackers: tuple[AnyTracker, ...] = (),
    ) -> None:
        self.metrics_path, self.steps, self.quiet = folder / "metrics.jsonl", steps, quiet
        self.tracker_configs, self.trackers = trackers, dict[str, Tracker]()
        self.metrics_file: Any = None
        self.progress_bar: Progress | None = None
        self.resumed_at, self.started = resumed_at, time.monotonic()

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        self._truncate_after(self.resumed_at)
        self.metrics_file = self.metrics_path.open(
            "ab", buffering=0
        )  # what does not fit is told now, and not on closing
        for tracker in self.tracker_configs:
            self.trackers[type(tracker).__name__] = tracker.open(self.metrics_path.parent, self.resumed_at)
        if sys.stderr.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self.progress_bar = Progress(*columns, console=Console(stderr=True))
            self.progress_bar.start()
            self.progress_task = self.progress_bar.add_task("", total=self.steps, completed=self.resumed_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress_bar is not None:
            self.progress_bar.stop()
            self.progress_bar = None
        self._call_trackers(lambda tracker: tracker.close())
        if self.metrics_file is not None:
            self.metrics_file.close()

    def log_step(self, step: int, metrics: dict[str, float]) -> None:
        """Every now and then: loss, speed, time left."""
        self._write_metrics(step, metrics)
        text = f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        if share := metrics.get("mfu"):
            text += f", {share:.0%} of peak"
        text += f", {self._time_left(step)} left"
        if self.progress_bar is not None:
            self.progress_bar.update(self.progress_task, completed=step, description=text)
        else:
            self.info(f"step {step}/{self.steps}: {text}")

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Figures of the held-out text, if there is any."""
        if not metrics:
            return
        self._write_metrics(step, metrics)
        told = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items()]
        if _VALID_NATS in metrics and _VALID_ERROR in metrics:
            others = {n: v for n, v in metrics.items() if n not in (_VALID_NATS, _VALID_ERROR)}
            told = [f"held out: {metrics[_VALID_NATS]:.3f} ± {metrics[_VALID_ERROR]:.3f} nats/token"]
            told += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in others.items()]
        self.info(f"step {step}: {', '.join(told)}")

    def log_skipped_step(self, step: int, loss: float, grad_norm: float) -> None:
        """A step that was not taken, because something was not finite."""
        self._append_record({"step": step, "skipped_batch": step - 1, "loss": repr(loss), "grad_norm": repr(grad_norm)})
        self.info(f"step {step} was skipped: loss {loss}, gradient {grad_norm} (batch {step - 1} of the data order)")

    def info(self, text: str) -> None:
        """A line for people."""
        if self.quiet:
            return
        if self.progress_bar is not None:
            self.progress_bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def _write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append_record({"step": step, **metrics})
        self._call_trackers(lambda tracker: tracker.write(step, metrics))

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        """A tracker that fails, whatever the reason, is left out from then on; the run goes on."""
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self.trackers[name]
                self.info(f"{name} failed and gets no more figures; {self.metrics_path.name} does. It said: {error}")

    def _time_left(self, step: int) -> str:
        """At the mean speed of this process so far, evaluations and saves included."""
        taken = time.monotonic() - self.started
        return format_duration(taken / (step - self.resumed_at) * (self.steps - step))

    def _append_record(self, record: dict[str, Any]) -> None:
        if self.metrics_file is None:
            return
        try:
            self.metrics_file.write((json.dumps(record) + "\n").encode())
        except OSError as error:  # which does not know the file's name
            raise OSError(error.errno, error.strerror, str(self.metrics_path)) from None

    def _truncate_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that the run goes on from, and lines that are broken."""
        if not self.metrics_path.exists():
            return
        lines = self.metrics_path.read_bytes().split(b"\n")
        kept = [line + b"\n" for line in lines if (of := _record_step(line)) is not None and of <= step]
        with atomic_file(self.metrics_path) as fresh:
            fresh.write_bytes(b"".join(kept))


def _record_step(line: bytes) -> int | None:
    """The step that a line is about; None if it was torn or damaged."""
    try:
        figures = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = figures.get("step") if isinstance(figures, dict) else None
    return step if isinstance(step, int) else None


def read_last_evaluation(folder: Path) -> tuple[int, float, float] | None:
    """The step, the nats per token and their standard error of a run's last evaluation, if there was one."""
    path, found = folder / "metrics.jsonl", None
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        if b"valid_nats_per_token" in line and (step := _record_step(line)) is not None:
            figures = json.loads(line)
            nats, error = figures["valid_nats_per_token"], figures.get("valid_standard_error", 0.0)
            if all(isinstance(each, int | float) and math.isfinite(each) for each in (nats, error)):
                found = (step, float(nats), float(error))
    return found


def format_duration(seconds: float) -> str:
    """Seconds as people say them, in two units at most: 45 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {smaller}"
    return f"{whole} s"
