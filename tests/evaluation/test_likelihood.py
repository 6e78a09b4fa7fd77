"""Scores: the right bound, an honest error, and the units people ask for."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from oracle import LINEAR, continuous_bound, random_table
from unmask import MDLM, Autoregression, Batch, LanguageModel, Tokenizer
from unmask.data.textsize import TextSize
from unmask.evaluation.likelihood import score_ids
from unmask.evaluation.score import Score, total
from unmask.model import ModelConfig
from unmask.types import Vocab


def test_the_score_is_the_exact_bound_and_its_error_is_honest() -> None:
    """Of 100 scores, about 95 should lie within two standard errors (eight replicates: t, so fewer)."""
    objective = MDLM(schedule=LINEAR)
    table = random_table(objective)
    exact = continuous_bound(table, LINEAR, (2, 0, 1))
    scores = [score_ids(table, objective, [2, 0, 1], None, draws=64, seed=seed) for seed in range(100)]
    within = sum(abs(s.nats - exact) < 2 * s.standard_error * s.tokens for s in scores)
    assert 80 <= within <= 99
    mean = sum(s.nats for s in scores) / 100
    assert abs(mean - exact) < 4 * math.sqrt(sum(s.variance for s in scores)) / 100


def test_more_draws_a_smaller_error() -> None:
    objective = MDLM(schedule=LINEAR)
    few, many = (
        total([score_ids(random_table(objective), objective, [2, 0, 1], None, draws, 0)] * 4)
        for draws in (16, 4096)
    )
    assert many.standard_error < few.standard_error / 4


def test_an_autoregressive_score_is_exact() -> None:
    objective = Autoregression()
    model, ids = tiny.denoiser(objective), [0, 1, 2, 3, 5]
    score = score_ids(model, objective, ids, None, draws=64, seed=0)
    nats = objective.token_nll(model, Batch(torch.tensor([ids])), torch.Generator())
    assert math.isclose(score.nats, float(nats.sum()), rel_tol=1e-9)
    assert score.standard_error == 0


def test_long_texts_are_scored_window_by_window() -> None:
    objective = Autoregression()
    model = tiny.denoiser(objective)
    ids = [0, 1, 2, 3] * 8  # 32 tokens through a model of 12
    windows = [score_ids(model, objective, ids[i : i + 12], None, 64, 0).nats for i in (0, 12, 24)]
    assert math.isclose(score_ids(model, objective, ids, None, 64, 0).nats, sum(windows), rel_tol=1e-9)


def test_units() -> None:
    score = Score(nats=20.0, variance=4.0, tokens=10, size=TextSize(25, 20, 5))
    assert score.nats_per_token == 2.0
    assert score.standard_error == 0.2
    assert math.isclose(score.perplexity, math.exp(2))
    assert math.isclose(score.bits_per_byte, 20 / math.log(2) / 25)
    both = total([score, score])
    assert both.nats_per_token == 2.0
    assert math.isclose(both.standard_error, 0.2 / math.sqrt(2))
    assert both.each == (score, score)


def test_a_model_that_knows_nothing_needs_log_v_nats() -> None:
    """A fresh model predicts uniformly."""
    tokenizer = Tokenizer.characters("abcd")
    config = ModelConfig(Vocab(5, 4), tiny.denoiser(MDLM()).config.backbone, MDLM())
    score = LanguageModel(config.build(), tokenizer).score(["abcdabcd", "dddd"], draws=4096)
    assert abs(score.nats_per_token - math.log(4)) < 4 * score.standard_error
    assert score.size == TextSize(12, 12, 4)
    assert [s.tokens for s in score.each] == [8, 4]


def test_bits_per_byte_need_bytes() -> None:
    with pytest.raises(ValueError, match="ids were scored"):
        _ = Score(1.0, 0.0, 1, None).bits_per_byte


def test_the_error_of_several_texts_is_honest_too() -> None:
    """Their draws are independent, so that variances add: the spread over seeds is the reported error."""
    lm = LanguageModel(tiny.denoiser(MDLM()))
    texts = [[0, 1, 2, 3], [5, 6, 0, 1, 2, 3, 0, 1], [3, 3, 3], [0, 2, 5, 0, 2, 5]] * 2
    scores = [lm.score(texts, draws=16, seed=seed) for seed in range(60)]
    real = float(torch.tensor([s.nats_per_token for s in scores]).std())
    reported = sum(s.standard_error for s in scores) / len(scores)
    assert 0.7 < reported / real < 1.4


def test_windows_add_their_variances() -> None:
    objective = MDLM(schedule=LINEAR)
    model = tiny.denoiser(objective)
    long, short = (
        sum(score_ids(model, objective, [0, 1, 2, 3] * n, None, 64, seed).variance for seed in range(20))
        for n in (12, 3)
    )
    assert 2 < long / short < 8  # four windows instead of one
