"""Scoring: seconds to the same standard error.

An estimate from one pass over the text has a variance, and passes are independent: the time to any error is
in proportion to the seconds and to the variance of a pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Result, converted, timed
from benchmarks.textbook import Size, Textbook, Trainer, score
from unmask.data.corpus import PrepareOptions, prepare
from unmask.data.loader import Loader, Wrapped
from unmask.evaluation.likelihood import score_rows

SIZE = Size(vocab=257, depth=4, width=256, length=256, heads=4)
WINDOWS, PASSES, WANTED = 64, 12, 0.01


def measured(groups: int = 3, training: int = 60) -> Result:
    """Seconds for Python's standard library to 1 %, with a model that has learned a little.

    The variance of a pass is that of all passes together: of `groups` x 12 it is known to about a quarter.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare(["stdlib"], Path(folder) / "corpus", "bytes", PrepareOptions())
        torch.manual_seed(0)
        trainer = Trainer(Textbook(SIZE), lr=1e-3, ema=0.9)
        loader = Loader(corpus.splits["train"], Wrapped(SIZE.length), 8)
        for step in range(training):
            trainer.step(loader.batch(step).tokens)
        held_out = Loader(corpus.splits["valid"], Wrapped(SIZE.length), batch_size=WINDOWS)
        windows = held_out.in_order(0, WINDOWS, of=WINDOWS).tokens
        model = converted(trainer.model)

        def theirs(_group: int) -> float:
            """The variance of a pass, relative to the squared nats."""
            estimates = score(trainer.model, windows, PASSES, batch=16)
            return float(estimates.var() / estimates.mean() ** 2)

        def ours(group: int) -> float:
            with model.inference():
                found = score_rows(
                    model.denoise, model.objective, held_out, None, WINDOWS, PASSES, seed=group
                )
            return PASSES * (found.standard_error / found.nats_per_token) ** 2

        textbook, own = _seconds(theirs, groups), _seconds(ours, groups)
    note = f"from {WINDOWS} windows in {groups} x {PASSES} passes"
    return Result("scoring to a standard error of 1 %", 5, textbook, own, note=note)


def _seconds(variance: Callable[[int], float], groups: int) -> tuple[float, ...]:
    """To the wanted error, from the time of each group of passes.

    A longer text needs fewer passes of more seconds each: its length does not matter.
    """
    variances: list[float] = []
    times = [timed(lambda group=group: variances.append(variance(group))) for group in range(groups)]  # type: ignore[misc]
    passes = sum(variances) / groups / WANTED**2
    return tuple(passes * time / PASSES for time in times)


if __name__ == "__main__":
    result = measured()
    print(result.textbook, result.ours, result.ratio)
