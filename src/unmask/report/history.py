"""What a run's folder says of itself without its model: settings, progress, curves, judged samples."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.untrusted import read_json

METRICS, SETTINGS = "metrics.jsonl", "experiment.json"


@dataclass(frozen=True)
class Curves:
    """Columns of `metrics.jsonl`: those of the steps, those of the evaluations, the steps not taken.

    A figure that was not finite is None.
    """

    step: tuple[int, ...]
    loss: tuple[float | None, ...]
    gradient: tuple[float | None, ...]
    learning_rate: tuple[float | None, ...]
    tokens_per_second: tuple[float | None, ...]
    tokens: tuple[int, ...]
    skipped: int
    evaluated_step: tuple[int, ...]
    evaluated_nats: tuple[float, ...]
    evaluated_error: tuple[float, ...]
    bad_steps: tuple[int, ...]

    @property
    def tokens_seen(self) -> int:
        """Up to the last line."""
        return self.tokens[-1] if self.tokens else 0

    @property
    def seconds(self) -> float | None:
        """The time spent in steps: of each line, the tokens since the line before over their speed."""
        parts = zip(itertools.pairwise((0, *self.tokens)), self.tokens_per_second, strict=True)
        return sum((now - before) / speed for (before, now), speed in parts if speed) or None

    def smoothed(self) -> list[float | None]:
        """The loss, exponentially averaged over about a tenth of the curve, without start-up bias."""
        keep = 1 - 1 / max(2.0, len(self.loss) / 20)
        mean = weight = 0.0
        smooth: list[float | None] = []
        for loss in self.loss:
            if loss is not None:
                mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
            smooth.append(mean / weight if weight else None)
        return smooth


@dataclass(frozen=True)
class Judged:
    """One set of samples as `unmask judge` measured it; `steps` are network calls if it has no steps."""

    sampler: str
    steps: float
    perplexity: float
    perplexity_error: float | None
    entropy: float
    entropy_error: float | None
    seconds: float
    judge: str | None


def read_settings(run: Path) -> dict[str, Any]:
    """`experiment.json` as it stands."""
    path = run / SETTINGS
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no {SETTINGS}")
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold the settings of an experiment; got {type(settings).__name__}")
    return settings


def read_curves(run: Path) -> Curves:
    """`metrics.jsonl`; lines that are damaged, or still being written, are left out."""
    path = run / METRICS
    lines = [_line(text) for text in path.read_text("utf-8", "replace").split("\n")] if path.exists() else []
    found = [line for line in lines if line is not None]
    bad = [line for line in found if "bad_batch" in line]
    steps = [line for line in found if "tokens_per_second" in line]
    evaluations = [line for line in found if _finite(line.get("valid_nats_per_token")) is not None]
    last = steps[-1] if steps else {}

    def column(name: str) -> tuple[float | None, ...]:
        return tuple(_finite(line.get(name)) for line in steps)

    return Curves(
        step=tuple(line["step"] for line in steps),
        loss=column("loss"),
        gradient=column("gradient"),
        learning_rate=column("lr"),
        tokens_per_second=column("tokens_per_second"),
        tokens=tuple(int(line.get("tokens", 0)) for line in steps),
        skipped=int(last.get("skipped", 0)),
        evaluated_step=tuple(line["step"] for line in evaluations),
        evaluated_nats=tuple(line["valid_nats_per_token"] for line in evaluations),
        evaluated_error=tuple(_finite(line.get("valid_standard_error")) or 0.0 for line in evaluations),
        bad_steps=tuple(line["step"] for line in bad),
    )


def read_judged(run: Path) -> tuple[Judged, ...]:
    """All that `unmask judge` left in `judge*.json` files of the run or of a folder in it."""
    paths = sorted([*run.glob("judge*.json"), *run.glob("*/judge*.json")])
    return tuple(judged for path in paths for judged in _judged(path))


def _judged(path: Path) -> list[Judged]:
    whole = read_json(path)
    entries = whole.get("judged") if isinstance(whole, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must hold what `unmask judge` writes: a list of measured samplers")
    return [_entry(entry, path) for entry in entries if entry.get("perplexity") is not None]


def _entry(entry: dict[str, Any], path: Path) -> Judged:
    figures = {name: _finite(entry.get(name)) for name in ("perplexity", "entropy", "seconds")}
    figures["steps"] = _finite(entry.get("steps")) or _finite(entry.get("network_calls"))
    missing = [name for name, value in figures.items() if value is None]
    if missing:
        raise ValueError(f"{path} has an entry without a finite {missing[0]}; run `unmask judge` again")
    return Judged(
        sampler=str(entry.get("sampler")),
        judge=None if entry.get("judge") is None else str(entry["judge"]),
        perplexity_error=_finite(entry.get("perplexity_error")),
        entropy_error=_finite(entry.get("entropy_error")),
        **{name: value for name, value in figures.items() if value is not None},
    )


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _finite(value: Any) -> float | None:
    """A number that can be drawn, or None; words such as 'nan' are what a bad step logs."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
