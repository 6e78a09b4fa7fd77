"""The figure of generative perplexity against time: more steps, better text, more seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from unmask.evaluation.evaluate import SamplerSpec, evaluate_samples
from unmask.evaluation.reference_model import CausalReferenceModel, ReferenceModel
from unmask.evaluation.sample_metrics import SampleMetrics
from unmask.reproduce._statistics import below
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Column, Estimate, Figures, Row, Setup, Table, TrainedModel, Training
from unmask.sampling.factory import default_sampler

_STEPS = {"tiny": (8, 32, 128), "paper": (32, 128, 1024)}
_METHODS = {"ar": "AR", "mdlm": "MDLM", "sedd": "SEDD"}
_SPEEDS = ("few", "some", "many")
_PERPLEXITY, _LOG = Column("perplexity", "generative perplexity"), Column("nats", "nats/token of the judge")
_ENTROPY, _SECONDS, _CALLS = Column("entropy", "entropy"), Column("seconds", "seconds/text"), Column("nfe", "calls")


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


def sample_columns(metrics: SampleMetrics) -> dict[str, Estimate]:
    """What is told of generated texts: quality, diversity and time."""
    assert metrics.perplexity is not None
    assert metrics.nats_per_token is not None
    return {
        _PERPLEXITY.key: Estimate(metrics.perplexity, metrics.perplexity_error or 0.0),
        _LOG.key: Estimate(metrics.nats_per_token, metrics.nats_per_token_error or 0.0),
        _ENTROPY.key: Estimate(metrics.entropy, metrics.entropy_error or 0.0),
        _SECONDS.key: Estimate(metrics.seconds / metrics.texts),
        _CALLS.key: Estimate(metrics.nfe),
    }


def load_judge(setup: Setup) -> ReferenceModel:
    """The reference model, loaded once."""
    assert setup.reference_model is not None
    return _load(setup.reference_model)


@lru_cache(maxsize=1)
def _load(source: str) -> CausalReferenceModel:
    return CausalReferenceModel.load(source)


def missing_judge(setup: Setup) -> str | None:
    """Why generated texts cannot be judged."""
    if setup.reference_model is None:
        return (
            "a causal language model must judge the texts: give --reference-model (`make reference-model` fetches one)"
        )
    return missing_text(setup)


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
    columns=(_PERPLEXITY, _LOG, _ENTROPY, _SECONDS, _CALLS),
    rows=_rows(),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below(
            "More steps lower MDLM's generative perplexity.",
            "mdlm-many",
            "mdlm-few",
            column=_LOG.key,
            paired=True,
        ),
        *(
            below(
                f"MDLM has a lower generative perplexity than SEDD with the same number of steps ({speed}).",
                f"mdlm-{speed}",
                f"sedd-{speed}",
                column=_LOG.key,
            )
            for speed in _SPEEDS
        ),
    ),
    protocol=(
        "16 unconditional texts (256 at the paper's scale) for each number of steps, with the default sampler of each"
        " method and without truncation; judged by a reference model.",
        "Entropy stands beside: perplexities of texts of different entropy cannot be compared.",
    ),
    data=f"a reference model (--reference-model); {TEXT}",
    missing=missing_judge,
    plot_columns=(_PERPLEXITY.key, _ENTROPY.key, _SECONDS.key),
)
