"""Curves and evaluated samples from the files of a run's folder."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.io.untrusted import read_json

_METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Curves:
    """The columns of `metrics.jsonl`: of logged steps, of evaluations, and of skipped steps.

    A value that was not finite is None.
    """

    step: tuple[int, ...]
    loss: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]
    lr_factor: tuple[float | None, ...]
    tokens_per_second: tuple[float | None, ...]
    tokens: tuple[int, ...]
    num_skipped: int
    valid_step: tuple[int, ...]
    valid_nats: tuple[float, ...]
    valid_error: tuple[float, ...]
    skipped_steps: tuple[int, ...]

    @property
    def tokens_seen(self) -> int:
        """Tokens up to the last logged step."""
        return self.tokens[-1] if self.tokens else 0

    @property
    def seconds(self) -> float | None:
        """The time in training: for each line, the tokens since the previous line over tokens per second."""
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
class SampleEval:
    """One set of samples as `unmask eval-samples` measured it; `steps` are network calls if it has no steps."""

    sampler: str
    steps: float
    perplexity: float
    perplexity_error: float | None
    entropy: float
    entropy_error: float | None
    seconds: float
    reference_model: str | None


def read_curves(run: Path) -> Curves:
    """`metrics.jsonl`; lines that are damaged or incomplete are skipped."""
    path = run / _METRICS_FILE
    lines = (
        [_parse_metrics_line(text) for text in path.read_text("utf-8", "replace").split("\n")] if path.exists() else []
    )
    records = [line for line in lines if line is not None]
    skipped = [line for line in records if "skipped_batch" in line]
    steps = [line for line in records if "tokens_per_second" in line]
    evaluations = [line for line in records if _finite_or_none(line.get("valid_nats_per_token")) is not None]
    last = steps[-1] if steps else {}

    def column(name: str) -> tuple[float | None, ...]:
        return tuple(_finite_or_none(line.get(name)) for line in steps)

    return Curves(
        step=tuple(line["step"] for line in steps),
        loss=column("loss"),
        grad_norm=column("grad_norm"),
        lr_factor=column("lr_factor"),
        tokens_per_second=column("tokens_per_second"),
        tokens=tuple(int(line.get("tokens", 0)) for line in steps),
        num_skipped=int(last.get("skipped_steps", 0)),
        valid_step=tuple(line["step"] for line in evaluations),
        valid_nats=tuple(line["valid_nats_per_token"] for line in evaluations),
        valid_error=tuple(_finite_or_none(line.get("valid_standard_error")) or 0.0 for line in evaluations),
        skipped_steps=tuple(line["step"] for line in skipped),
    )


def read_sample_evals(run: Path) -> tuple[SampleEval, ...]:
    """All that `unmask eval-samples` left in `sample_evals*.json` files of the run or of a folder in it."""
    paths = sorted([*run.glob("sample_evals*.json"), *run.glob("*/sample_evals*.json")])
    return tuple(result for path in paths for result in _parse_sample_evals(path))


def _parse_sample_evals(path: Path) -> list[SampleEval]:
    content = read_json(path)
    entries = content.get("sample_evals") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must hold what `unmask eval-samples` writes: a list of measured samplers")
    return [_parse_sample_eval(entry, path) for entry in entries if entry.get("perplexity") is not None]


def _parse_sample_eval(entry: dict[str, Any], path: Path) -> SampleEval:
    figures = {name: _finite_or_none(entry.get(name)) for name in ("perplexity", "entropy", "seconds")}
    figures["steps"] = _finite_or_none(entry.get("steps")) or _finite_or_none(entry.get("nfe"))
    missing = [name for name, value in figures.items() if value is None]
    if missing:
        raise ValueError(f"{path} has an entry without a finite {missing[0]}; run `unmask eval-samples` again")
    return SampleEval(
        sampler=str(entry.get("sampler")),
        reference_model=None if entry.get("reference_model") is None else str(entry["reference_model"]),
        perplexity_error=_finite_or_none(entry.get("perplexity_error")),
        entropy_error=_finite_or_none(entry.get("entropy_error")),
        **{name: value for name, value in figures.items() if value is not None},
    )


def _parse_metrics_line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _finite_or_none(value: Any) -> float | None:
    """A finite number, or None: a skipped step logs words such as 'nan'."""
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_finite else None
