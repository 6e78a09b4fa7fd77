"""Scoring: seconds to the same standard error.

    python -m benchmarks.scoring        # words and bytes

Passes over a text are independent, so the time to reach an error is proportional to the seconds and to the
variance of one pass. Seconds are those of networks of the reference's shape. Variances of both estimators are those
of a trained `unmask` model: in an untrained one, the control variate explains nearly all of the variance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.baseline import nll_estimates
from benchmarks.side_by_side import RandomTokens, Result, fastest_pair, time_alternating
from benchmarks.time_to_quality import train
from examples.mdlm_reference import ModelSize
from unmask import MDLM, LanguageModel
from unmask.data.corpus import prepare
from unmask.data.loader import Loader, Wrapped
from unmask.experiment import Experiment
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.recipes import stdlib_tiny, text8_tiny

WINDOWS, PASSES, DRAWS, TARGET_ERROR = 16, 50, 2, 0.01


@dataclass(frozen=True)
class Case:
    """A network to time, and a recipe for the small model whose variance is measured."""

    name: str
    size: ModelSize
    experiment: Experiment
    steps: int


def word_case() -> Case:
    """GPT-2's vocabulary; the variance is that of 4,096 pieces of words."""
    return Case("V = 50,258, 8 x 512", ModelSize(50_258, depth=8, width=512, length=128), stdlib_tiny(), 300)


def byte_case() -> Case:
    """Bytes."""
    experiment = replace(text8_tiny(), sources=("stdlib",), tokenizer="bytes")
    return Case("bytes, 4 x 256", ModelSize(257, depth=4, width=256, length=256, heads=4), experiment, 200)


def measure_scoring(case: Case, groups: int = 3) -> Result:
    """Seconds for `WINDOWS` windows of Python's standard library to 1 %, each group with draws of its own."""
    baseline_variances, ours_variances = _variances(case, groups)
    text = RandomTokens.generate(WINDOWS * case.size.length, case.size.vocab)
    windows = torch.from_numpy(text.ids).view(WINDOWS, -1)
    reference, precision, model = fastest_pair(
        case.size, lambda reference: nll_estimates(reference, windows, draws=1, batch=WINDOWS)
    )
    loader = Loader(text, Wrapped(case.size.length), WINDOWS)

    def score() -> None:
        with model.inference_mode():
            score_corpus(model.denoiser, model.objective, loader, EvalConfig(replicates=DRAWS))

    seconds = time_alternating(
        lambda: nll_estimates(reference, windows, draws=DRAWS, batch=WINDOWS), score, repeats=groups
    )
    slow, fast = (
        tuple(variance / TARGET_ERROR**2 * time / DRAWS for variance, time in zip(variances, times, strict=True))
        for variances, times in zip((baseline_variances, ours_variances), seconds, strict=True)
    )
    ratio = sum(baseline_variances) / sum(ours_variances)
    note = f"variances are {ratio:.1f} to 1, from {groups} x {PASSES} passes over {WINDOWS} windows"
    return Result(f"scoring to a standard error of 1 %, {case.name}", precision, slow, fast, note=note)


def _variances(case: Case, groups: int) -> tuple[list[float], list[float]]:
    """Variances of one pass, relative to the squared nats: of the reference's estimator, and of ours."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = case.experiment
        corpus = prepare(experiment.sources, Path(folder), experiment.tokenizer, experiment.prepare)
        model, _ = train(experiment, corpus, 0, seed=0, steps=case.steps)
        loader = Loader(corpus.splits["valid"], Wrapped(experiment.layout.length), WINDOWS)
        batch = loader.sequential_batch(0, WINDOWS, num_windows=WINDOWS)
        assert isinstance(model.objective, MDLM)
        coins = replace(model.objective, exact_mask_counts=False)

        def by_coins(group: int) -> float:
            generator = torch.Generator().manual_seed(group)
            nats = [float(coins.token_nll(model.denoiser, batch, generator).sum()) for _ in range(PASSES)]
            return float(torch.tensor(nats).double().var() / torch.tensor(nats).double().mean() ** 2)

        def our_way(group: int) -> float:
            found = score_corpus(model.denoiser, model.objective, loader, EvalConfig(WINDOWS, PASSES, seed=group))
            return PASSES * (found.standard_error / found.nats_per_token) ** 2

        return _repeat(model, by_coins, groups), _repeat(model, our_way, groups)


def _repeat(model: LanguageModel, variance: Callable[[int], float], groups: int) -> list[float]:
    with model.inference_mode():
        return [variance(group) for group in range(groups)]


if __name__ == "__main__":
    for case in (word_case(), byte_case()):
        result = measure_scoring(case)
        print(result.work, result.baseline, result.ours, result.ratios, result.note, sep="\n  ", flush=True)
