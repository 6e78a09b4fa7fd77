"""The cost of sampling against length, vocabulary, steps and batch size, compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from benchmarks.side_by_side import fastest_pair, time_once
from examples.mdlm_reference import ModelSize, ancestral_sample
from unmask import Ancestral

SIZE = ModelSize(vocab=4096, depth=4, width=256, length=128, heads=4)
BATCH_SIZE, STEPS = 4, 16
AXES: dict[str, tuple[int, ...]] = {
    "length": (64, 128, 256, 1024),
    "vocabulary": (256, 2048, 32768),
    "steps": (16, 64, 256, 1024),
    "batch": (1, 4, 16),
}


@dataclass(frozen=True)
class Point:
    """Seconds to generate texts; the reference is timed for up to 64 of its steps, which all take the same time."""

    axis: str
    value: int
    ours: float
    baseline: float
    nfe: int
    num_queries: int


def measure_scaling() -> list[Point]:
    """Vary one size at a time, from 4 texts of 128 tokens, a vocabulary of 4,096 and 16 steps."""
    return [_measure_point(axis, value) for axis, values in AXES.items() for value in values]


def _measure_point(axis: str, value: int) -> Point:
    size, rows, steps = SIZE, BATCH_SIZE, STEPS
    if axis == "length":
        size = replace(SIZE, length=value)
    elif axis == "vocabulary":
        size = replace(SIZE, vocab=value)
    elif axis == "steps":
        steps = value
    else:
        rows = value
    blank = torch.full((rows, size.length), size.vocab - 1)
    reference, _, model = fastest_pair(size, lambda reference: ancestral_sample(reference, blank, steps, max_steps=1))
    model.generate(blank, Ancestral(1))
    done = model.generate(blank, Ancestral(steps))
    ours = min(time_once(lambda: model.generate(blank, Ancestral(steps))) for _ in range(2 if steps <= 64 else 1))
    measured_steps = min(steps, 64)
    seconds = time_once(lambda: ancestral_sample(reference, blank, steps, max_steps=measured_steps))
    baseline = seconds * steps / measured_steps
    return Point(axis, value, ours, baseline, done.nfe, done.num_queries)


if __name__ == "__main__":
    for point in measure_scaling():
        print(point, flush=True)
