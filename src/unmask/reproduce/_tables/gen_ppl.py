"""The figure of generative perplexity against time: more steps, better text, more seconds."""

from __future__ import annotations

from collections.abc import Sequence

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
from unmask.sampling.factory import default_sampler

_STEPS = {"tiny": (8, 32, 128), "paper": (32, 128, 1024)}
_METHODS = {"ar": "AR", "mdlm": "MDLM", "sedd": "SEDD"}
_SPEEDS = ("few", "some", "many")


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, *_METHODS)


def _measure(trained: TrainedModel) -> Figures:
    """By number of steps; an autoregressive model has one number only, its length."""
    trained.lm.denoiser.prepack()
    texts = 16 if trained.setup.is_tiny else 256
    judge = load_judge(trained.setup)
    figures = {}
    for speed, steps in zip(_SPEEDS, _STEPS[trained.setup.scale], strict=True):
        sampler = default_sampler(trained.lm.denoiser, steps)
        row = trained.method if sampler.steps is None else f"{trained.method}-{speed}"
        if row not in figures:
            spec = SamplerSpec(row, sampler.steps, sampler)
            metrics = evaluate_samples(trained.lm, spec, texts, None, 1000 * trained.seed, judge)
            figures[row] = sample_columns(metrics)
    return figures


def _rows() -> tuple[Row, ...]:
    diffusion = [
        Row(f"{key}-{speed}", f"{label}, {tiny} steps ({paper} in the paper)")
        for key, label in _METHODS.items()
        if key != "ar"
        for speed, tiny, paper in zip(_SPEEDS, _STEPS["tiny"], _STEPS["paper"], strict=True)
    ]
    return (Row("ar", "AR, a token at a time"), *diffusion)


TABLE = Table(
    name="gen-ppl",
    number="Figure 2",
    title="Generative perplexity against time",
    columns=(JUDGED, JUDGE_NATS, ENTROPY, SECONDS, CALLS),
    rows=_rows(),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below(
            "More steps lower MDLM's generative perplexity.",
            "mdlm-many",
            "mdlm-few",
            column=JUDGE_NATS.key,
            paired=True,
        ),
        *(
            below(
                f"MDLM has a lower generative perplexity than SEDD with the same number of steps ({speed}).",
                f"mdlm-{speed}",
                f"sedd-{speed}",
                column=JUDGE_NATS.key,
            )
            for speed in _SPEEDS
        ),
    ),
    protocol=(
        "16 unconditional texts (256 at the paper's scale) for each number of steps, with the default sampler of each"
        " method and without truncation; judged by a reference model.",
        "Entropy stands beside: perplexities of texts of different entropy cannot be compared.",
    ),
    needs=JUDGE + TEXT,
    missing=missing_judge,
    plot_columns=(ENTROPY.key,),
    curve=(SECONDS.key, JUDGED.key),
)
