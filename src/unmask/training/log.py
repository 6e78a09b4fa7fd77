"""What a run says: `metrics.jsonl` always; a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Log:
    """Figures of a run, to a file and to people; `quiet` on ranks that do not speak for all."""

    def __init__(self, folder: Path, steps: int, resumed_at: int, quiet: bool = False) -> None:
        self.path, self.steps, self.quiet = folder / "metrics.jsonl", steps, quiet
        self.file: Any = None
        self.bar: Progress | None = None
        self.resumed_at = resumed_at

    def __enter__(self) -> Self:
        if self.quiet:
            return self
        self._forget_after(self.resumed_at)
        self.file = self.path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps, completed=self.resumed_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.file is not None:
            self.file.close()

    def step(self, step: int, figures: dict[str, float]) -> None:
        """Every now and then: loss, speed."""
        self._write({"step": step, **figures})
        text = f"loss {figures['loss']:.3f}, {figures['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        else:
            self.say(f"step {step}/{self.steps}: {text}")

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Figures of the held-out text."""
        self._write({"step": step, **figures})
        self.say(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))

    def bad_step(self, step: int, loss: float, gradient: float) -> None:
        """A step that was not taken, because something was not finite."""
        self._write({"step": step, "bad_batch": step - 1, "loss": repr(loss), "gradient": repr(gradient)})
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

    def _write(self, figures: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.write(json.dumps(figures) + "\n")
            self.file.flush()

    def _forget_after(self, step: int) -> None:
        """Drop what was logged after the checkpoint that the run goes on from (and a torn last line)."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):
                continue
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(kept), encoding="utf-8")
        os.replace(fresh, self.path)
