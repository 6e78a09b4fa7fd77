"""Table 5: texts longer than the network, by MDLM in sliding windows and by SSD-LM in blocks: quality and seconds."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.baselines import SimplexBlocks
from unmask.evaluation.evaluate import SamplerSpec, evaluate_samples
from unmask.reproduce._judging import (
    CALLS,
    ENTROPY,
    JUDGE,
    JUDGE_NATS,
    JUDGED,
    SECONDS,
    load_judge,
    missing_judge,
    sample_columns,
)
from unmask.reproduce._statistics import below
from unmask.reproduce._trainings import TEXT, text_trainings
from unmask.reproduce._vocabulary import Figures, Row, Setup, Table, TrainedModel, Training
from unmask.sampling import Sampler
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.semi_autoregressive import SemiAutoregressive

_STEPS = {"tiny": 50, "paper": 1000}
_TEXTS = {"tiny": 4, "paper": 200}
_LENGTH = 2048
"""Tokens of a text: 16 windows of a small network, 2 of the paper's."""


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "ssd-lm")


def _measure(trained: TrainedModel) -> Figures:
    scale, length = trained.setup.scale, trained.experiment.layout.length
    trained.lm.denoiser.prepack()
    steps = _STEPS[scale]
    sampler: Sampler = SimplexBlocks(steps)
    if trained.method == "mdlm":
        sampler = SemiAutoregressive(stride=length // 2, sampler=Ancestral(steps))
    spec = SamplerSpec(trained.method, steps, sampler)
    judge, seed = load_judge(trained.setup), 1000 * trained.seed
    metrics = evaluate_samples(trained.lm, spec, _TEXTS[scale], _LENGTH, seed, judge)
    return {trained.method: sample_columns(metrics)}


TABLE = Table(
    name="ssd-lm",
    number="Table 5",
    title="Long texts: MDLM in windows against SSD-LM in blocks",
    columns=(JUDGED, JUDGE_NATS, ENTROPY, SECONDS, CALLS),
    rows=(
        Row("ssd-lm", "SSD-LM, blocks of 25", {JUDGED.key: "35.43", SECONDS.key: "2,473.9"}),
        Row("mdlm", "MDLM, windows", {JUDGED.key: "27.18", SECONDS.key: "89.3"}),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below("MDLM has a lower generative perplexity than SSD-LM.", "mdlm", "ssd-lm", column=JUDGE_NATS.key),
        below("MDLM writes a text in less time than SSD-LM.", "mdlm", "ssd-lm", column=SECONDS.key),
        below("MDLM is at least ten times as fast.", "mdlm", "ssd-lm", column=SECONDS.key, factor=0.1),
    ),
    protocol=(
        "4 texts of 2,048 tokens at once, 50 steps for each window or block (200 texts and 1,000 steps at the paper's"
        " scale); MDLM moves its window by half of its length.",
        "Both are trained on the same rows for as many steps. SSD-LM predicts one block of each row, so it learns from"
        " fewer tokens; it has no likelihood, and none is shown.",
        "Entropy stands beside: SSD-LM projects to a nucleus of 0.2, as published, which lowers perplexity and"
        " entropy alike, while MDLM draws without truncation.",
    ),
    needs=JUDGE + TEXT,
    missing=missing_judge,
    plot_columns=(JUDGED.key, SECONDS.key, ENTROPY.key),
)
