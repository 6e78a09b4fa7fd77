"""The log of a run: `metrics.jsonl` and trackers; a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from unmask.io.atomic import atomic_file
from unmask.training._trackers import AnyTracker, Tracker

METRICS_FILE = "metrics.jsonl"

_VALID_NATS, _VALID_ERROR = "valid_nats_per_token", "valid_standard_error"
"""Metrics of an evaluation that are logged as one."""


class TrainingLogger:
    """Metrics of a run, to a file and to standard error; `quiet` on all ranks but the first.

    `unit`: what the losses are summed over.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        resumed_at: int,
        quiet: bool = False,
        trackers: tuple[AnyTracker, ...] = (),
        unit: str = "tokens",
    ) -> None:
        self.metrics_path, self.steps, self.quiet, self.unit = folder / METRICS_FILE, steps, quiet, unit
        self.tracker_configs, self.trackers = trackers, dict[str, Tracker]()
        self.metrics_file: Any = None
        self.progress_bar: Progress | None = None
        self.resumed_at, self.started = resumed_at, time.monotonic()

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        self._truncate_after(self.resumed_at)
        self.metrics_file = self.metrics_path.open("ab", buffering=0)  # a full disk fails now, not on closing
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
        """Log a step: loss, throughput, time left."""
        self._write_metrics(step, metrics)
        text = f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} {self.unit}/s"
        if share := metrics.get("mfu"):
            text += f", {share:.0%} of peak"
        text += f", {self._time_left(step)} left"
        if self.progress_bar is not None:
            self.progress_bar.update(self.progress_task, completed=step, description=text)
        else:
            self.info(f"step {step}/{self.steps}: {text}")

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics of the held-out text, if there are any."""
        if not metrics:
            return
        self._write_metrics(step, metrics)
        parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items()]
        if _VALID_NATS in metrics and _VALID_ERROR in metrics:
            others = {n: v for n, v in metrics.items() if n not in (_VALID_NATS, _VALID_ERROR)}
            parts = [f"held out: {metrics[_VALID_NATS]:.3f} ± {metrics[_VALID_ERROR]:.3f} nats/token"]
            parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in others.items()]
        self.info(f"step {step}: {', '.join(parts)}")

    def log_skipped_step(self, step: int, loss: float, grad_norm: float) -> None:
        """Log a step that was skipped because its loss or gradient was not finite."""
        self._append_record({"step": step, "skipped_batch": step - 1, "loss": repr(loss), "grad_norm": repr(grad_norm)})
        self.info(f"step {step} was skipped: loss {loss}, gradient {grad_norm} (batch {step - 1} of the data order)")

    def info(self, text: str) -> None:
        """Print a line to standard error."""
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
        """A tracker that fails, for whatever reason, is dropped; the run goes on."""
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self.trackers[name]
                self.info(f"{name} failed and gets no more metrics; {self.metrics_path.name} still does: {error}")

    def _time_left(self, step: int) -> str:
        """At the mean speed of this process so far, with evaluations and checkpoints."""
        taken = time.monotonic() - self.started
        return format_duration(taken / (step - self.resumed_at) * (self.steps - step))

    def _append_record(self, record: dict[str, Any]) -> None:
        if self.metrics_file is None:
            return
        try:
            self.metrics_file.write((json.dumps(record) + "\n").encode())
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(self.metrics_path)) from None

    def _truncate_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that the run resumes from, and broken lines."""
        if not self.metrics_path.exists():
            return
        lines = self.metrics_path.read_bytes().split(b"\n")
        complete = [line + b"\n" for line in lines if (at := record_step(line)) is not None and at <= step]
        with atomic_file(self.metrics_path) as file:
            file.write_bytes(b"".join(complete))


def record_step(line: bytes) -> int | None:
    """The step of a line of metrics.jsonl; None if it is incomplete or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def format_duration(seconds: float) -> str:
    """A duration in two units at most: 45 s, 3 min 20 s, 2 h 05 min, 3 d 04 h."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {smaller}"
    return f"{whole} s"
