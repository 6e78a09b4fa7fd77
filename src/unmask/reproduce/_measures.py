"""Measurements that several tables take of a trained model."""

from __future__ import annotations

from unmask.data.loader import Loader, RowLayout
from unmask.evaluation.evaluate import EVAL_BATCH_SIZE, evaluate_corpus
from unmask.likelihood.corpus import EvalConfig
from unmask.likelihood.score import Score
from unmask.reproduce._vocabulary import Column, Estimate, Figures, TrainedModel

NATS, PERPLEXITY = Column("nats", "nats/token"), Column("perplexity", "perplexity")
BITS_PER_BYTE = Column("bits_per_byte", "bits/byte")


def score_columns(score: Score) -> dict[str, Estimate]:
    """The bound in the usual units."""
    nats, error = score.nats_per_token, score.standard_error
    columns = {
        PERPLEXITY.key: Estimate(score.perplexity, score.perplexity * error),
        NATS.key: Estimate(nats, error),
    }
    if score.text_stats is not None:
        bits = score.bits_per_byte
        columns[BITS_PER_BYTE.key] = Estimate(bits, bits * error / nats)
    return columns


def held_out_layout(trained: TrainedModel) -> RowLayout:
    """Rows as in training, or shorter ones if little text was held out."""
    layout = trained.experiment.layout
    return layout.with_length(min(layout.length, trained.corpus.splits["valid"].num_tokens))


def held_out_loader(trained: TrainedModel) -> Loader:
    """The held-out text in batches."""
    return Loader(trained.corpus.splits["valid"], held_out_layout(trained), EVAL_BATCH_SIZE)


def held_out_score(trained: TrainedModel) -> Score:
    """The bound on the held-out part of the text that the model was trained on, by its own objective."""
    config = EvalConfig(trained.setup.windows, replicates=8, seed=trained.seed)
    return evaluate_corpus(trained.lm, trained.corpus, "valid", held_out_layout(trained), config)


def held_out_columns(trained: TrainedModel) -> Figures:
    """The bound on held-out text as the row of the method."""
    return {trained.method: score_columns(held_out_score(trained))}
