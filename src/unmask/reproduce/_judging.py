"""Generated texts, judged by a reference model: quality, diversity and time."""

from __future__ import annotations

from functools import lru_cache

from unmask.evaluation.reference_model import CausalReferenceModel, ReferenceModel
from unmask.evaluation.sample_metrics import SampleMetrics
from unmask.reproduce._trainings import missing_text
from unmask.reproduce._vocabulary import Column, Estimate, Needs, Setup

JUDGED, JUDGE_NATS = Column("perplexity", "generative perplexity"), Column("nats", "nats/token of the judge")
ENTROPY, SECONDS, CALLS = Column("entropy", "entropy"), Column("seconds", "seconds/text"), Column("nfe", "calls")


def sample_columns(metrics: SampleMetrics) -> dict[str, Estimate]:
    """What is told of generated texts: quality, diversity and time."""
    assert metrics.perplexity is not None
    assert metrics.nats_per_token is not None
    return {
        JUDGED.key: Estimate(metrics.perplexity, metrics.perplexity_error or 0.0),
        JUDGE_NATS.key: Estimate(metrics.nats_per_token, metrics.nats_per_token_error or 0.0),
        ENTROPY.key: Estimate(metrics.entropy, metrics.entropy_error or 0.0),
        SECONDS.key: Estimate(metrics.seconds / metrics.texts),
        CALLS.key: Estimate(metrics.nfe),
    }


JUDGE = Needs(*["a reference model: --reference-model"] * 2)
"""What tables with generated texts need."""


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
