"""Less noise, the same mean: by enumeration of what a draw may hide."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import LINEAR, TableDenoiser, continuous_bound, random_table
from unmask import MDLM
from unmask.diffusion.noise_level import NoiseLevel, continuous_level, discrete_level, fixed_count_level
from unmask.diffusion.schedule import Cosine
from unmask.likelihood._control_variate import _MAX_NATS, control_variate, unconditional_nll
from unmask.likelihood._estimate import NatsEstimator
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests


def hidden_sets(n: int, k: int, length: int) -> torch.Tensor:
    """Every way to hide k of the first n places of a row."""
    sets = list(combinations(range(n), k))
    hidden = torch.zeros(len(sets), length, dtype=torch.bool)
    for row, places in enumerate(sets):
        hidden[row, list(places)] = True
    return hidden


def count_level(n: int, k: int) -> NoiseLevel:
    """The level of draws that hide k of n tokens."""
    return fixed_count_level(LINEAR, torch.tensor([[(k - 0.5) / n]], dtype=torch.float64), torch.ones(1, n).bool())


@given(st.lists(st.floats(0, _MAX_NATS), min_size=1, max_size=6), st.data())
def test_luck_is_zero_on_average_for_every_k(u: list[float], data: st.DataObject) -> None:
    n = len(u)
    k = data.draw(st.integers(1, n))
    hidden = hidden_sets(n, k, n + 2)  # the last two are not counted
    counted = (torch.arange(n + 2) < n).expand(hidden.shape)
    price = torch.tensor([*u, 5.0, 7.0], dtype=torch.float64).expand(hidden.shape)
    share = control_variate(price, hidden, counted, count_level(n, k))
    assert bool((share[:, n:] == 0).all())
    torch.testing.assert_close(share.mean(0), torch.zeros(n + 2, dtype=torch.float64), atol=1e-9, rtol=0)


@given(st.lists(st.floats(0, _MAX_NATS), min_size=1, max_size=5), st.floats(0.01, 0.99), st.sampled_from([None, 1, 7]))
def test_luck_is_zero_on_average_at_every_time(u: list[float], place: float, steps: int | None) -> None:
    """Over all sets that may be hidden, each with its probability; in continuous time and in steps."""
    n, where = len(u), torch.tensor([[place]], dtype=torch.float64)
    level = continuous_level(Cosine(), where) if steps is None else discrete_level(Cosine(), steps, where)
    hidden = torch.cat([hidden_sets(n, k, n) for k in range(n + 1)])
    alpha, count = float(level.alpha), hidden.sum(1, keepdim=True).double()
    chance = (1 - alpha) ** count * alpha ** (n - count)
    assert float(chance.sum()) == pytest.approx(1)
    share = control_variate(torch.tensor(u).double().expand(hidden.shape), hidden, torch.ones_like(hidden), level)
    torch.testing.assert_close((chance * share).sum(0), torch.zeros(n, dtype=torch.float64), atol=1e-9, rtol=0)


def test_nats_that_follow_the_prices_are_steadied_altogether() -> None:
    """nats = 3 + 2u a token: with a beta of 2 every draw has the text's own nats."""
    hidden = hidden_sets(6, 2, 6)
    u = torch.linspace(0.1, 2, 6, dtype=torch.float64).expand(hidden.shape)
    nats = ((3 + 2 * u) * hidden * 6 / 2).sum(1)
    left = nats - 2 * control_variate(u, hidden, torch.ones_like(hidden), count_level(6, 2)).sum(1)
    torch.testing.assert_close(left, (3 + 2 * u).sum(1))
    assert float(nats.std()) > 1


def test_prices_are_those_of_an_empty_text() -> None:
    objective = MDLM(schedule=LINEAR)
    table = random_table(objective, drift=0.0)
    empty = torch.full((1, 3), table.vocab.mask_id)
    log_x = table(empty, torch.ones(1, 1), torch.tensor([[False, True, False]]))[0]
    found = unconditional_nll(table, 3, torch.device("cpu"))
    torch.testing.assert_close(found, (-log_x.double()).clamp(max=_MAX_NATS))
    assert float(found[table.vocab.mask_id]) == _MAX_NATS


def words(objective: MDLM) -> TableDenoiser:
    """What a token costs depends on what it is, and a little on what is visible."""
    table = random_table(objective, drift=0.0)
    return replace(table, logits=torch.tensor([2.0, 0.0, -2.0, 0.0]) + 0.3 * table.logits)


@pytest.mark.slow
def test_scores_have_the_same_mean_and_less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = MDLM(schedule=LINEAR)
    table = words(objective)
    exact = continuous_bound(table, LINEAR, (2, 0, 1))

    def variance() -> float:
        request = [ScoreRequest([2, 0, 1])]
        scores = [
            score_requests(table, objective, request, ScoreConfig(16, seed=seed), per_token=True) for seed in range(300)
        ]
        nats = np.array([score.nats for score in scores])
        assert abs(nats.mean() - exact) < 4 * nats.std() / math.sqrt(len(nats))
        told = np.mean([score.variance for score in scores])
        assert 0.75 < told / nats.var() < 1.33  # the error that is told is the one that there is
        for score in scores[:5]:
            assert sum(score.token_nats) == pytest.approx(score.nats)
        return float(nats.var())

    steadied = variance()
    monkeypatch.setattr(NatsEstimator, "token_baseline", lambda *_: None)
    assert steadied < variance() / 3
