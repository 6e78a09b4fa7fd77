"""Metrics of generated texts: perplexity under a reference model, and diversity of tokens.

Neither means much alone. Repetitive text has a low perplexity under any reference model, and random tokens are as
diverse as possible: compare perplexities only between samples of equal length and similar entropy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.evaluation.reference_model import ReferenceModel

_REPETITION_NGRAM = 4
"""The n of the n-grams of `repetition`."""

_TokenSequences = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class SampleMetrics:
    """The metrics of one set of samples; None where one is undefined or was not requested.

    `tokens` are the model's, `scored_tokens` the reference model's. Errors are standard errors over samples: they
    cover the choice of samples, not that of the model or the reference model.
    """

    sampler: str
    steps: int | None
    seconds: float
    nfe: int
    texts: int
    tokens: int
    entropy: float
    entropy_error: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repetition: float | None
    reference_model: str | None = None
    scored_texts: int = 0
    scored_tokens: int = 0
    nats_per_token: float | None = None
    nats_per_token_error: float | None = None
    perplexity: float | None = None
    perplexity_error: float | None = None
    own_nats_at_least: float | None = None
    own_nats_at_most: float | None = None
    own_nats_error: float | None = None


def sample_metrics(
    texts: Sequence[str],
    sequences: _TokenSequences,
    reference_model: ReferenceModel | None = None,
    *,
    sampler: str,
    seconds: float,
    nfe: int,
    steps: int | None = None,
) -> SampleMetrics:
    """Measure samples, given as texts (for the reference model) and as sequences of token ids.

    perplexity = exp(total nats / total predicted tokens); its error is the delta method's.
    """
    if len(sequences) == 0:
        raise ValueError("there are no samples to measure; give at least one")
    entropy, entropy_error = _unigram_entropy(sequences)
    return SampleMetrics(
        sampler=sampler,
        steps=steps,
        seconds=seconds,
        nfe=nfe,
        texts=len(sequences),
        tokens=sum(len(row) for row in sequences),
        entropy=entropy,
        entropy_error=entropy_error,
        distinct_1=_distinct_ngrams(sequences, 1),
        distinct_2=_distinct_ngrams(sequences, 2),
        distinct_3=_distinct_ngrams(sequences, 3),
        repetition=_repetition(sequences),
        **({} if reference_model is None else _reference_metrics(reference_model, texts, len(sequences))),
    )


def _unigram_entropy(sequences: _TokenSequences) -> tuple[float, float | None]:
    """The mean over samples of H = -sum_v p_v log p_v in nats, and its standard error.

    p is the histogram of the tokens within the sample, so H is at most log(tokens); an empty sample's is 0.
    """
    entropies = []
    for row in sequences:
        counts = Counter(_ngrams(row, 1)).values()
        entropies.append(sum(-n / len(row) * math.log(n / len(row)) for n in counts))
    mean = sum(entropies) / len(entropies)
    spread = sum((entropy - mean) ** 2 for entropy in entropies)
    return mean, math.sqrt(spread / (len(sequences) - 1) / len(sequences)) if len(sequences) > 1 else None


def _distinct_ngrams(sequences: _TokenSequences, n: int) -> float | None:
    """Different n-grams / n-grams, over all samples; None if no sample has n tokens.

    It falls with the number and length of the samples: compare sets of the same size only.
    """
    ngrams = [ngram for row in sequences for ngram in _ngrams(row, n)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def _repetition(sequences: _TokenSequences) -> float | None:
    """The mean over samples of 1 - different 4-grams / 4-grams: the share of repeated 4-grams (seq-rep-4).

    Samples of fewer than four tokens are skipped; None if all are.
    """
    samples = [ngrams for row in sequences if (ngrams := _ngrams(row, _REPETITION_NGRAM))]
    shares = [1 - len(set(ngrams)) / len(ngrams) for ngrams in samples]
    return sum(shares) / len(shares) if shares else None


def _nats_per_token(scored: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """R = sum nats / sum tokens of texts, and its standard error, that of a ratio of two means.

    error^2 = n/(n - 1) sum (nats_i - R tokens_i)^2 / (sum tokens)^2, by the delta method; None for one text.
    """
    scored = [(nats, tokens) for nats, tokens in scored if tokens > 0]
    if not scored:
        raise ValueError("no text has a token that the reference model can predict; give longer texts")
    total = sum(tokens for _, tokens in scored)
    ratio = sum(nats for nats, _ in scored) / total
    if len(scored) == 1:
        return ratio, None
    spread = sum((nats - ratio * tokens) ** 2 for nats, tokens in scored)
    return ratio, math.sqrt(len(scored) / (len(scored) - 1) * spread) / total


def _reference_metrics(reference_model: ReferenceModel, texts: Sequence[str], num_samples: int) -> dict[str, Any]:
    if len(texts) != num_samples:
        raise ValueError(
            f"the reference model needs the text of each sample; got {len(texts)} texts of {num_samples} samples"
        )
    scored = reference_model.nll(texts)
    ratio, error = _nats_per_token(scored)
    perplexity = math.exp(ratio)
    return {
        "reference_model": reference_model.name,
        "scored_texts": sum(tokens > 0 for _, tokens in scored),
        "scored_tokens": sum(tokens for _, tokens in scored),
        "nats_per_token": ratio,
        "nats_per_token_error": error,
        "perplexity": perplexity,
        "perplexity_error": None if error is None else perplexity * error,
    }


def _ngrams(sequence: Sequence[int] | Tensor, n: int) -> list[tuple[int, ...]]:
    ids = [int(token) for token in sequence]  # the elements of a tensor would all be different
    return list(zip(*(ids[start:] for start in range(n)), strict=False))
