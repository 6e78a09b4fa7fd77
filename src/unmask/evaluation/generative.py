"""What generated texts are worth: a judge's perplexity of them, and how varied their tokens are.

Neither half means much alone. A sampler that repeats itself pleases every judge, and random tokens are as
varied as can be: perplexities may be compared between sets of samples of equal length and like entropy only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.evaluation.judge import Judge

REPEATED = 4
"""The length of the n-grams that `repetition` looks for."""

Rows = Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Generated:
    """All that was measured of one set of samples; None where it cannot be told, or was not asked for.

    `tokens` are the model's own, `judged_tokens` the judge's. An error is the standard error over samples,
    and so covers the choice of samples, not of the model or the judge.
    """

    sampler: str
    steps: int | None
    seconds: float
    network_calls: int
    texts: int
    tokens: int
    entropy: float
    entropy_error: float | None
    distinct_1: float | None
    distinct_2: float | None
    distinct_3: float | None
    repetition: float | None
    judge: str | None = None
    judged_texts: int = 0
    judged_tokens: int = 0
    nats_per_token: float | None = None
    nats_per_token_error: float | None = None
    perplexity: float | None = None
    perplexity_error: float | None = None


def measure(
    texts: Sequence[str],
    rows: Rows,
    judge: Judge | None = None,
    *,
    sampler: str,
    seconds: float,
    network_calls: int,
    steps: int | None = None,
) -> Generated:
    """Measure samples, given as texts (which only a judge reads) and as rows of token ids.

    perplexity = exp(total nats / total predicted tokens); its error is the delta method's.
    """
    if len(rows) == 0:
        raise ValueError("there are no samples to measure; at least one is needed")
    entropy, entropy_error = unigram_entropy(rows)
    return Generated(
        sampler=sampler,
        steps=steps,
        seconds=seconds,
        network_calls=network_calls,
        texts=len(rows),
        tokens=sum(len(row) for row in rows),
        entropy=entropy,
        entropy_error=entropy_error,
        distinct_1=distinct(rows, 1),
        distinct_2=distinct(rows, 2),
        distinct_3=distinct(rows, 3),
        repetition=repetition(rows),
        **({} if judge is None else _verdict(judge, texts, len(rows))),
    )


def unigram_entropy(rows: Rows) -> tuple[float, float | None]:
    """The mean over samples of H = -sum_v p_v log p_v in nats, and its standard error.

    p is the histogram of the tokens within the sample, so H is at most log(tokens); an empty sample's is 0.
    """
    entropies = []
    for row in rows:
        counts = Counter(_ngrams(row, 1)).values()
        entropies.append(sum(-n / len(row) * math.log(n / len(row)) for n in counts))
    mean = sum(entropies) / len(entropies)
    spread = sum((entropy - mean) ** 2 for entropy in entropies)
    return mean, math.sqrt(spread / (len(rows) - 1) / len(rows)) if len(rows) > 1 else None


def distinct(rows: Rows, n: int) -> float | None:
    """Different n-grams / n-grams, over all samples; None if no sample has n tokens.

    It falls as samples become more or longer: compare sets of one size only.
    """
    ngrams = [ngram for row in rows for ngram in _ngrams(row, n)]
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def repetition(rows: Rows) -> float | None:
    """The mean over samples of 1 - different 4-grams / 4-grams: the share that was there before (seq-rep-4).

    Samples of fewer than four tokens are left out; None if all are.
    """
    samples = [ngrams for row in rows if (ngrams := _ngrams(row, REPEATED))]
    shares = [1 - len(set(ngrams)) / len(ngrams) for ngrams in samples]
    return sum(shares) / len(shares) if shares else None


def nats_per_token(judged: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """R = sum nats / sum tokens of texts, and its standard error, that of a ratio of two means.

    error^2 = n/(n - 1) sum (nats_i - R tokens_i)^2 / (sum tokens)^2, by the delta method; None for one text.
    """
    judged = [(nats, tokens) for nats, tokens in judged if tokens > 0]
    if not judged:
        raise ValueError("no text has a token that the judge could predict; longer texts are needed")
    total = sum(tokens for _, tokens in judged)
    ratio = sum(nats for nats, _ in judged) / total
    if len(judged) == 1:
        return ratio, None
    spread = sum((nats - ratio * tokens) ** 2 for nats, tokens in judged)
    return ratio, math.sqrt(len(judged) / (len(judged) - 1) * spread) / total


def _verdict(judge: Judge, texts: Sequence[str], samples: int) -> dict[str, Any]:
    if len(texts) != samples:
        raise ValueError(
            f"a judge needs the text of each sample; got {len(texts)} texts of {samples} samples"
        )
    judged = judge.nats(texts)
    ratio, error = nats_per_token(judged)
    perplexity = math.exp(ratio)
    return {
        "judge": judge.name,
        "judged_texts": sum(tokens > 0 for _, tokens in judged),
        "judged_tokens": sum(tokens for _, tokens in judged),
        "nats_per_token": ratio,
        "nats_per_token_error": error,
        "perplexity": perplexity,
        "perplexity_error": None if error is None else perplexity * error,
    }


def _ngrams(row: Sequence[int] | Tensor, n: int) -> list[tuple[int, ...]]:
    ids = [int(token) for token in row]  # the elements of a tensor would all be different
    return list(zip(*(ids[start:] for start in range(n)), strict=False))
