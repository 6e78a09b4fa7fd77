"""Scoring: seconds to the same standard error.

An estimate from one pass over the text has a variance, and passes are independent: the time to any error is
in proportion to the seconds and to the variance of a pass.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Result, converted
from benchmarks.textbook import Size, Textbook, Trainer, score
from unmask.data.corpus import PrepareOptions, prepare
from unmask.data.loader import Loader, Wrapped
from unmask.evaluation.likelihood import score_rows

SIZE = Size(vocab=257, depth=4, width=256, length=256, heads=4)
WINDOWS, PASSES, WANTED = 64, 12, 0.01


def measured(groups: int = 3, training: int = 60) -> Result:
    """Seconds for a megabyte of Python's standard library to 1 %, with a model that has learned a little."""
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
        theirs, ours = [], []
        for group in range(groups):
            start = time.perf_counter()
            estimates = score(trainer.model, windows, PASSES, batch=16)
            theirs.append(_seconds(time.perf_counter() - start, estimates.numpy()))
            start = time.perf_counter()
            with model.inference():
                found = score_rows(
                    model.denoise, model.objective, held_out, None, WINDOWS, PASSES, seed=group
                )
            taken = time.perf_counter() - start
            relative = found.standard_error / found.nats_per_token
            ours.append(taken * relative**2 * 1e6 / windows.numel() / WANTED**2)
    note = f"seconds for 1 MB to 1 %, from {WINDOWS} windows in {PASSES} passes"
    return Result("scoring, equal standard error", 5, tuple(theirs), tuple(ours), note=note)


def _seconds(taken: float, estimates: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    """For a megabyte of bytes to the wanted error."""
    relative = estimates.std(ddof=1) / len(estimates) ** 0.5 / estimates.mean()
    return float(taken * relative**2 * 1e6 / (WINDOWS * SIZE.length) / WANTED**2)


if __name__ == "__main__":
    result = measured()
    print(result.textbook, result.ours, result.ratio)
