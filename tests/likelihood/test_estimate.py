"""Scores: the right bound, an honest error, and the units people ask for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_models
from oracle import LINEAR, continuous_bound, random_table
from unmask import D3PM, MDLM, Batch, LanguageModel, NextToken, Tokenizer
from unmask.data.corpus import TextStats
from unmask.data.loader import Loader, Wrapped
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.time_sampling import ClippedTimes
from unmask.likelihood._estimate import _low_variance_objective
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import TIME_BINS, Score, combine_scores
from unmask.model import ModelConfig
from unmask.objectives.base import Objective
from unmask.types import Vocab


def score_ids(denoiser: DenoiserLike, objective: Objective, ids: list[int], draws: int, seed: int) -> Score:
    return score_requests(denoiser, objective, [ScoreRequest(ids)], ScoreConfig(draws, seed=seed), per_token=True)


def test_the_score_is_the_exact_bound_and_its_error_is_honest() -> None:
    """Of 100 scores, about 95 should lie within two standard errors (eight replicates: t, so fewer)."""
    objective = MDLM(schedule=LINEAR)
    table = random_table(objective)
    exact = continuous_bound(table, LINEAR, (2, 0, 1))
    scores = [score_ids(table, objective, [2, 0, 1], 64, seed) for seed in range(100)]
    within = sum(abs(s.nats - exact) < 2 * s.standard_error * s.tokens for s in scores)
    assert 80 <= within <= 99
    mean = sum(s.nats for s in scores) / 100
    assert abs(mean - exact) < 4 * math.sqrt(sum(s.variance for s in scores)) / 100


def test_more_draws_a_smaller_error() -> None:
    objective = MDLM(schedule=LINEAR)
    few, many = (
        combine_scores([score_ids(random_table(objective), objective, [2, 0, 1], draws, 0)] * 4) for draws in (16, 4096)
    )
    assert many.standard_error < few.standard_error / 4


def test_an_autoregressive_score_is_exact() -> None:
    objective = NextToken()
    model, ids = tiny_models.tiny_denoiser(objective), [0, 1, 2, 3, 5]
    score = score_ids(model, objective, ids, 64, 0)
    nats = objective.token_nll(model, Batch(torch.tensor([ids])), torch.Generator())
    assert math.isclose(score.nats, float(nats.sum()), rel_tol=1e-9)
    assert score.standard_error == 0


def test_long_texts_are_scored_window_by_window() -> None:
    objective = NextToken()
    model = tiny_models.tiny_denoiser(objective)
    ids = [0, 1, 2, 3] * 8  # 32 tokens through a model of 12
    windows = [score_ids(model, objective, ids[i : i + 12], 64, 0).nats for i in (0, 12, 24)]
    assert math.isclose(score_ids(model, objective, ids, 64, 0).nats, sum(windows), rel_tol=1e-9)


def test_units() -> None:
    score = Score(nats=20.0, variance=4.0, tokens=10, text_stats=TextStats(25, 20, 5))
    assert score.nats_per_token == 2.0
    assert score.standard_error == 0.2
    assert math.isclose(score.perplexity, math.exp(2))
    assert math.isclose(score.bits_per_byte, 20 / math.log(2) / 25)
    both = combine_scores([score, score])
    assert both.nats_per_token == 2.0
    assert math.isclose(both.standard_error, 0.2 / math.sqrt(2))
    assert both.per_text == (score, score)


def test_a_model_that_knows_nothing_needs_log_v_nats() -> None:
    """A fresh model predicts uniformly."""
    tokenizer = Tokenizer.characters("abcd")
    config = ModelConfig(Vocab(5, 4), tiny_models.tiny_denoiser(MDLM()).config.backbone, MDLM())
    score = LanguageModel(config.build(), tokenizer).score(["abcdabcd", "dddd"], draws=4096)
    assert score.nats_per_token == pytest.approx(math.log(4))  # exact counts leave no noise at all
    assert score.standard_error < 1e-6
    assert score.text_stats == TextStats(12, 12, 4)
    assert [s.tokens for s in score.per_text] == [8, 4]


def test_bits_per_byte_need_bytes() -> None:
    with pytest.raises(ValueError, match="ids were scored"):
        _ = Score(1.0, 0.0, 1, None).bits_per_byte


@pytest.mark.slow
def test_the_error_of_several_texts_is_honest_too() -> None:
    """Their draws are independent, so that variances add: the spread over seeds is the reported error."""
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    texts = [[0, 1, 2, 3], [5, 6, 0, 1, 2, 3, 0, 1], [3, 3, 3], [0, 2, 5, 0, 2, 5]] * 2
    scores = [lm.score(texts, draws=16, seed=seed) for seed in range(60)]
    real = float(torch.tensor([s.nats_per_token for s in scores]).std())
    reported = sum(s.standard_error for s in scores) / len(scores)
    assert 0.7 < reported / real < 1.4


def test_windows_add_their_variances() -> None:
    objective = MDLM(schedule=LINEAR)
    model = tiny_models.tiny_denoiser(objective)
    long, short = (
        sum(score_ids(model, objective, [0, 1, 2, 3] * n, 64, seed).variance for seed in range(20)) for n in (12, 3)
    )
    assert 2 < long / short < 8  # four windows instead of one


def uniform_model() -> LanguageModel:
    """Fresh weights predict uniformly: every hidden token costs log 4, at any time."""
    config = ModelConfig(Vocab(5, 4), tiny_models.tiny_denoiser(MDLM()).config.backbone, MDLM(schedule=LINEAR))
    return LanguageModel(config.build(), Tokenizer.characters("abcd"))


def test_nats_are_told_apart_by_time() -> None:
    """The integrand of a uniform prediction is flat: w(t) t log V = log V."""
    score = uniform_model().score(["abcdabcdabcd"], draws=8_000)
    assert len(score.by_time) == TIME_BINS
    assert math.isclose(sum(score.by_time), score.nats_per_token)
    for nats, error in zip(score.by_time, score.by_time_error, strict=True):
        assert nats == pytest.approx(math.log(4) / TIME_BINS, rel=0.02)
        assert error < 0.01 * nats
    both = combine_scores([score, score])
    assert both.by_time == pytest.approx(score.by_time)
    assert both.by_time_error == pytest.approx([e / math.sqrt(2) for e in score.by_time_error])


def test_an_exact_score_has_no_times() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(NextToken()))
    score = lm.score([[0, 1, 2], [3, 3]])
    assert score.by_time == score.by_time_error == ()
    assert score.standard_error == 0
    assert "by_time" not in score.to_dict()


@pytest.mark.parametrize("precision", [0.02, 0.005])
def test_draws_are_made_until_the_error_is_small_enough(precision: float) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    plain = lm.score([[0, 1, 2, 3, 5, 6]], draws=16)
    assert plain.standard_error > precision * plain.nats_per_token
    score = lm.score([[0, 1, 2, 3, 5, 6]], draws=16, precision=precision)
    assert score.standard_error <= 1.5 * precision * score.nats_per_token
    with pytest.raises(ValueError, match=r"0\.01 for a standard error of 1 %"):
        lm.score([[0]], precision=2.0)


def test_a_network_that_is_told_the_time_is_scored_by_coins() -> None:
    """Exact counts would be another bound for it."""
    objective = MDLM(schedule=LINEAR)
    table = random_table(objective)
    assert _low_variance_objective(table, objective) is objective
    assert _low_variance_objective(random_table(objective, drift=0.0), objective) == MDLM(
        schedule=LINEAR, exact_mask_counts=True
    )
    in_steps = MDLM(schedule=LINEAR, steps=5)
    assert _low_variance_objective(random_table(in_steps, drift=0.0), in_steps) is in_steps
    assert _low_variance_objective(random_table(D3PM(), drift=0.0), D3PM()) == D3PM()
    part = MDLM(schedule=LINEAR, times=ClippedTimes(0.0, 0.3))  # which would be no bound
    assert _low_variance_objective(random_table(part), part) == MDLM(schedule=LINEAR)


def test_the_error_after_a_search_for_precision_is_honest() -> None:
    """It is that of draws whose number was fixed before, not of the first that looked good."""
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    scores = [lm.score([[0, 1, 2, 3, 5, 6]], draws=16, precision=0.05, seed=seed) for seed in range(80)]
    real = float(torch.tensor([s.nats_per_token for s in scores]).std())
    reported = math.sqrt(sum(s.standard_error**2 for s in scores) / len(scores))
    assert 0.8 < reported / real < 1.3


def test_steps_are_filed_under_the_time_before_them() -> None:
    lm = uniform_model()
    lm.denoiser.config = replace(lm.denoiser.config, objective=MDLM(schedule=LINEAR, steps=TIME_BINS))
    score = lm.score(["abcdabcdabcd"], draws=8_000)
    for nats in score.by_time:
        assert nats == pytest.approx(math.log(4) / TIME_BINS, rel=0.15)


class Ids:
    """A token stream of one document."""

    num_tokens = 100
    document_ends = np.array([100])

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) % 4


def test_rows_are_passed_over_until_the_error_is_small_enough() -> None:
    lm, loader = LanguageModel(tiny_models.tiny_denoiser(MDLM())), Loader(Ids(), Wrapped(12), batch_size=4)
    told: list[int] = []
    score = score_corpus(lm.denoiser, lm.objective, loader, EvalConfig(None, 2, 0.003), progress=told.append)
    assert score.standard_error <= 0.003 * score.nats_per_token
    assert told == sorted(told)
    assert told[-1] % 9 == 0  # whole passes over nine rows
    assert told[-1] > 2 * 9


def test_units_of_some_rows() -> None:
    lm, loader = uniform_model(), Loader(Ids(), Wrapped(12), batch_size=4)
    size = TextStats(bytes=120, characters=90, words=30)
    score = score_corpus(lm.denoiser, lm.objective, loader, EvalConfig(5, 2), size)
    assert score.tokens == 60
    assert score.text_stats == size
    assert math.isclose(score.bits_per_character, score.nats / math.log(2) / 90)
    assert math.isclose(score.word_perplexity, math.exp(score.nats / 30))
    figures = score.to_dict()
    assert figures["word_perplexity_error"] == pytest.approx(score.word_perplexity * score.standard_error * 60 / 30)


def test_words_and_line_ends_are_counted() -> None:
    assert TextStats.from_text("no it was n't\n<unk> N\n") == TextStats(22, 22, 8)
    assert TextStats.from_text("zwei Wörter") == TextStats(12, 11, 3)
