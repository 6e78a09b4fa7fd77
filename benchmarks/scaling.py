"""What sampling costs as length, vocabulary, steps and batch grow, both ways."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.measure import fast_pair, timed
from benchmarks.textbook import Size, fill
from unmask import Ancestral

SIZE = Size(vocab=4096, depth=4, width=256, length=128, heads=4)
ROWS, STEPS = 4, 16
AXES: dict[str, tuple[int, ...]] = {
    "length": (64, 128, 256, 1024),
    "vocabulary": (256, 2048, 32768),
    "steps": (16, 64, 256, 1024),
    "batch": (1, 4, 16),
}


@dataclass(frozen=True)
class Point:
    """Seconds to write some texts; the textbook's are measured for up to 64 of its steps, which are alike."""

    axis: str
    value: int
    ours: float
    textbook: float
    calls: int
    head_rows: int


def measured() -> list[Point]:
    """Each axis by itself, from 4 texts of 128 tokens over 4,096 in 16 steps."""
    return [_point(axis, value) for axis, values in AXES.items() for value in values]


def _point(axis: str, value: int) -> Point:
    size, rows, steps = SIZE, ROWS, STEPS
    if axis == "length":
        size = replace(SIZE, length=value)
    elif axis == "vocabulary":
        size = replace(SIZE, vocab=value)
    elif axis == "steps":
        steps = value
    else:
        rows = value
    blank = torch.full((rows, size.length), size.vocab - 1)
    textbook, _, model = fast_pair(size, lambda textbook: fill(textbook, blank, steps, only=1))
    model.fill(blank, Ancestral(1))
    done = model.fill(blank, Ancestral(steps))
    ours = min(timed(lambda: model.fill(blank, Ancestral(steps))) for _ in range(2 if steps <= 64 else 1))
    some = min(steps, 64)
    theirs = timed(lambda: fill(textbook, blank, steps, only=some)) * steps / some
    return Point(axis, value, ours, theirs, done.network_calls, done.head_rows)


if __name__ == "__main__":
    for point in measured():
        print(point, flush=True)
