"""Measures of samples: by hand on small ones, by brute force on random ones, errors by simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from unmask.evaluation.sample_metrics import (
    ReferenceModel,
    SampleMetrics,
    _distinct_ngrams,
    _nats_per_token,
    _repetition,
    _unigram_entropy,
    sample_metrics,
)


@dataclass(frozen=True)
class Letters:
    """Charges every character after the first, vowels three nats and others two."""

    name: str = "letters"

    def nll(self, texts: Sequence[str]) -> list[tuple[float, int]]:
        return [(sum(3.0 if c in "aeiou" else 2.0 for c in t[1:]), max(0, len(t) - 1)) for t in texts]


def measured(texts: Sequence[str], judge: ReferenceModel | None = None) -> SampleMetrics:
    rows = [[ord(char) for char in text] for text in texts]
    return sample_metrics(texts, rows, judge, sampler="Ancestral", seconds=2.5, nfe=7, steps=16)


def test_entropy_is_that_of_each_samples_own_histogram() -> None:
    uniform, constant, skewed = [1, 2, 3, 4], [9] * 5, [1, 1, 1, 2]
    assert _unigram_entropy([uniform]) == (pytest.approx(math.log(4)), None)
    assert _unigram_entropy([constant])[0] == 0
    skew = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    mean, error = _unigram_entropy([uniform, constant, skewed])
    assert mean == pytest.approx((math.log(4) + skew) / 3)
    assert error == pytest.approx(np.std([math.log(4), 0, skew], ddof=1) / math.sqrt(3))


def test_an_empty_sample_is_counted_with_no_entropy() -> None:
    assert _unigram_entropy([[], [1, 2]])[0] == pytest.approx(math.log(2) / 2)


def test_distinct_ngrams_are_counted_over_all_samples() -> None:
    rows = [[1, 2, 1, 2], [1, 2, 3]]
    assert _distinct_ngrams(rows, 1) == 3 / 7
    assert _distinct_ngrams(rows, 2) == 3 / 5  # 12 21 12, 12 23
    assert _distinct_ngrams(rows, 3) == 3 / 3  # 121 212, 123
    assert _distinct_ngrams(rows, 5) is None


def test_repetition_is_the_share_of_4_grams_that_were_there_before() -> None:
    assert _repetition([[1, 2, 3, 4, 5, 6]]) == 0
    assert _repetition([[7] * 8]) == pytest.approx(4 / 5)
    assert _repetition([[7] * 8, [1, 2, 3, 4], [1, 2, 3, 4], [7]]) == pytest.approx(4 / 5 / 3)  # within a sample
    assert _repetition([[1, 2, 3], []]) is None


def test_repetition_by_brute_force() -> None:
    row = np.random.default_rng(0).integers(0, 3, 200).tolist()
    seen: list[list[int]] = []
    again = 0
    for start in range(197):
        again += row[start : start + 4] in seen
        seen.append(row[start : start + 4])
    assert 0 < again < 197
    assert _repetition([row]) == pytest.approx(again / 197)


def test_a_tensor_of_ids_is_rows_of_ids() -> None:
    rows = [[1, 2, 1, 2, 1, 2], [3, 3, 3, 3, 3, 3]]
    tensor = torch.tensor(rows)
    for measured_of in (_unigram_entropy, _repetition, lambda r: _distinct_ngrams(r, 2)):
        assert measured_of(tensor) == measured_of(rows) == measured_of(list(tensor))


def test_perplexity_weighs_tokens_not_texts() -> None:
    assert _nats_per_token([(10.0, 5), (90.0, 15)])[0] == 5.0


def test_the_error_of_the_ratio_is_honest() -> None:
    """Texts of unequal lengths, on which their nats depend: the spread of R over sets is the error."""
    rng = np.random.default_rng(0)

    def texts() -> list[tuple[float, int]]:
        tokens = rng.integers(5, 60, size=40)
        nats = tokens * (3 + 0.02 * tokens + rng.normal(0, 0.5, size=40))
        return [(float(a), int(b)) for a, b in zip(nats, tokens, strict=True)]

    sets = [_nats_per_token(texts()) for _ in range(2000)]
    ratios, errors = np.array(sets).T
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.05)
    truth = np.mean(ratios)
    assert 0.92 < np.mean(np.abs(ratios - truth) < 1.96 * errors) < 0.965


def test_the_error_is_the_jackknifes_too() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(20, 60, size=200)
    nats = tokens * rng.normal(3, 0.3, size=200)
    left_out = (nats.sum() - nats) / (tokens.sum() - tokens)
    jackknife = math.sqrt(199 / 200 * float(((left_out - left_out.mean()) ** 2).sum()))
    error = _nats_per_token(list(zip(nats.tolist(), tokens.tolist(), strict=True)))[1]
    assert error == pytest.approx(jackknife, rel=0.01)


def test_equal_texts_of_equal_length_have_the_error_of_a_mean() -> None:
    ratio, error = _nats_per_token([(10.0, 10), (20.0, 10), (60.0, 10)])
    assert ratio == pytest.approx(3.0)
    assert error == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))


def test_all_that_was_measured() -> None:
    result = measured(["banana", "bbb", "x", ""], Letters())
    assert result == SampleMetrics(
        sampler="Ancestral",
        steps=16,
        seconds=2.5,
        nfe=7,
        texts=4,
        tokens=10,
        entropy=_unigram_entropy([[2, 1, 14, 1, 14, 1], [2] * 3, [24], []])[0],
        entropy_error=_unigram_entropy([[2, 1, 14, 1, 14, 1], [2] * 3, [24], []])[1],
        distinct_1=4 / 10,
        distinct_2=4 / 7,  # ba an na an na, bb bb
        distinct_3=4 / 5,  # ban ana nan ana, bbb
        repetition=0.0,
        reference_model="letters",
        scored_texts=2,
        scored_tokens=7,
        nats_per_token=17 / 7,
        nats_per_token_error=_nats_per_token([(13.0, 5), (4.0, 2)])[1],
        perplexity=math.exp(17 / 7),
        perplexity_error=math.exp(17 / 7) * (_nats_per_token([(13.0, 5), (4.0, 2)])[1] or 0),
    )
    assert json.loads(json.dumps(asdict(result)))["perplexity"] == result.perplexity


def test_the_error_of_the_perplexity_follows_from_that_of_the_nats() -> None:
    result = measured(["banana", "bbb"], Letters())
    assert result.perplexity is not None
    assert result.perplexity_error is not None
    assert result.nats_per_token is not None
    assert result.nats_per_token_error is not None
    step = 1e-6 * result.nats_per_token_error
    slope = (math.exp(result.nats_per_token + step) - math.exp(result.nats_per_token - step)) / (2 * step)
    assert result.perplexity_error == pytest.approx(slope * result.nats_per_token_error, rel=1e-3)


def test_one_sample_has_no_error() -> None:
    result = measured(["banana"], Letters())
    assert (result.entropy_error, result.nats_per_token_error, result.perplexity_error) == (None, None, None)
    assert result.perplexity == pytest.approx(math.exp(13 / 5))


def test_without_a_judge_texts_are_not_needed() -> None:
    result = sample_metrics((), torch.tensor([[1, 2, 3, 4]]), sampler="x", seconds=1.0, nfe=1)
    assert (result.texts, result.tokens, result.reference_model, result.perplexity) == (1, 4, None, None)
    assert (result.scored_texts, result.scored_tokens) == (0, 0)


def test_what_cannot_be_measured_is_told() -> None:
    with pytest.raises(ValueError, match="no samples to measure"):
        measured([])
    with pytest.raises(ValueError, match="no text has a token that the reference model can predict"):
        measured(["", "a"], Letters())
    with pytest.raises(ValueError, match="got 1 texts of 2 samples"):
        sample_metrics(["a"], [[1], [2]], Letters(), sampler="x", seconds=1.0, nfe=1)
