"""What a text costs under a sampler's own law: exact where its order follows from predictions, else bounded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import tiny_models
from unmask import D3PM, MDLM, BlockDiffusion, NextToken, SamplingParams
from unmask.sampling import (
    Ancestral,
    Autoregressive,
    Blockwise,
    Confidence,
    EntropyBounded,
    Factor,
    FirstHitting,
    JointThreshold,
    RandomOrder,
    ReMDM,
    Sampler,
    Threshold,
)
from unmask.sampling.blockwise import DualCache, NoCache, PrefixCache
from unmask.sampling.canvas import Canvas
from unmask.sampling.law import _GivenText, law_bounds, text_nats
from unmask.types import Batch

TEXTS = torch.tensor(list(itertools.product(range(3), repeat=4)))
"""All texts of four tokens out of three."""
ANY_ORDER: list[Sampler] = [
    Confidence(4, "best-probability"),
    Confidence(2, "margin"),
    Confidence(4, "entropy", SamplingParams(temperature=0.7)),
    Confidence(4, "margin", SamplingParams(top_k=2)),
    Threshold(0.4, measure="best-probability"),
    Factor(0.8, measure="best-probability"),
    EntropyBounded(0.8),
    RandomOrder(3),
    Ancestral(3),
    FirstHitting(),
    Blockwise(sub_block_size=1, sampler=Confidence(1, "margin")),
    *(Blockwise(2, Confidence(2, "margin"), cache) for cache in (NoCache(), PrefixCache(), DualCache())),
    Blockwise(2, RandomOrder(1), end_ids=(2,)),
]


def total(objective: Any, sampler: Sampler, seed: int, timed: bool = False) -> float:
    """The sum of the probabilities of all texts, given the noise of a seed."""
    denoiser = tiny_models.tiny_denoiser(objective, size=4, mask=3, length=4, time_conditioned=timed)
    return float((-text_nats(denoiser, sampler, TEXTS, [seed] * len(TEXTS)).sum(1)).exp().sum())


@pytest.mark.parametrize("timed", [False, True], ids=["timeless", "timed"])
@pytest.mark.parametrize("sampler", ANY_ORDER, ids=repr)
def test_probabilities_of_all_texts_sum_to_one(sampler: Sampler, timed: bool) -> None:
    for seed in (0, 5):
        assert total(MDLM(), sampler, seed, timed) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("inner", [Confidence(2, "margin"), Ancestral(2), Threshold(0.5, measure="best-probability")])
def test_so_they_do_beside_an_exact_cache(inner: Sampler) -> None:
    assert total(BlockDiffusion(block_size=2), Blockwise(sampler=inner), 3) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("sampler", ANY_ORDER, ids=repr)
def test_a_text_is_written_again_as_it_was(sampler: Sampler) -> None:
    """With the noise of its draw: the same canvases, in the same order."""
    denoiser = tiny_models.tiny_denoiser(MDLM(), size=4, mask=3, length=4)
    canvas = Canvas(torch.full((6, 4), 3), tuple(range(6)))
    canvases = [z.clone() for z in sampler.run(denoiser, canvas)]
    if not sampler.end_ids:
        again = list(sampler.run(_GivenText(denoiser, canvases[-1]), canvas))
        assert [z.tolist() for z in again] == [z.tolist() for z in canvases]


def test_left_to_right_is_what_an_autoregressive_model_is_scored_with() -> None:
    denoiser = tiny_models.tiny_denoiser(NextToken(), size=4, mask=3, length=4)
    nats = text_nats(denoiser, Autoregressive(), TEXTS, [0] * len(TEXTS))
    expected = denoiser.objective.token_nll(denoiser, Batch(TEXTS), torch.Generator())
    torch.testing.assert_close(nats, expected.double())


def written_by_rule(table: oracle.TableDenoiser, x: oracle.State, at_once: int) -> float:
    """p(x) where the positions with the most probable best tokens are written first, from scratch."""
    state, p = list(oracle.ALL_MASKED), 1.0
    prediction = dict(zip(oracle.STATES, oracle.probabilities(table, 0.5), strict=True))
    while oracle.MASK in state:
        now = prediction[tuple(state)]
        masked = [place for place in range(oracle.LENGTH) if state[place] == oracle.MASK]
        best = sorted(masked, key=lambda place: -float(now[place].max()))
        for place in best[:at_once]:
            p *= now[place, x[place]]
            state[place] = x[place]
    return p


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_it_is_the_law_of_the_sampler(at_once: int) -> None:
    table = oracle.random_table(MDLM(), seed=4, drift=0)
    sampler = Confidence(math.ceil(oracle.LENGTH / at_once), "best-probability")
    law = {x: written_by_rule(table, x, at_once) for x in oracle.CLEAN_STATES}
    assert sum(law.values()) == pytest.approx(1)
    nats = text_nats(table, sampler, torch.tensor(oracle.CLEAN_STATES), [9] * len(law)).sum(1)
    assert (-nats).exp().tolist() == pytest.approx(list(law.values()))
    seen = oracle.sample_counts(sampler, table, 4_000, 400)
    assert oracle.chi_square_p_value(seen, law) > 1e-3


def probabilities_by_order(table: oracle.TableDenoiser, x: oracle.State) -> np.ndarray:
    """p(x | order) of all six orders, with noise that is searched for them."""
    found: dict[tuple[int, ...], float] = {}
    for seed in itertools.count():
        *_, nats = [text_nats(table, RandomOrder(3), torch.tensor([x]), [seed])]
        found.setdefault(tuple(nats[0].tolist()), float((-nats.sum()).exp()))
        if len(found) == 6:
            return np.array(list(found.values()))
    raise AssertionError


def test_the_mean_over_orders_is_the_law_of_random_orders() -> None:
    table = oracle.random_table(MDLM(), seed=1, drift=0)
    law = oracle.random_order_distribution(table)
    for x in [(0, 1, 2), (2, 2, 0)]:
        assert probabilities_by_order(table, x).mean() == pytest.approx(law[x])


def expected_bounds(p: np.ndarray, draws: int) -> tuple[float, float, float]:
    """The expectations of the mean, the upper and the lower bound, over all choices of `draws` orders."""
    choices = torch.tensor(list(itertools.product(-np.log(p), repeat=draws)), dtype=torch.float64).T
    bounds = law_bounds(choices)  # every choice as a part: sums over all of them
    return bounds.mean / choices.shape[1], bounds.upper / choices.shape[1], bounds.lower / choices.shape[1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=3))
def test_bounds_hold_on_average_and_tighten(values: list[float]) -> None:
    p = np.array(values)
    truth = -math.log(p.mean())
    mean, upper, lower = expected_bounds(p, 4)
    _, tighter, higher = expected_bounds(p, 6)
    slack = 1e-9
    assert lower - slack <= truth <= tighter + slack <= upper + 2 * slack <= mean + 3 * slack
    assert higher >= lower - slack
    assert mean == pytest.approx(float(-np.log(p).mean()))


def test_orders_that_agree_leave_no_gap() -> None:
    bounds = law_bounds(torch.full((8, 3), 2.0, dtype=torch.float64))
    assert (bounds.mean, bounds.upper, bounds.lower) == pytest.approx((6, 6, 6))
    assert (bounds.mean_variance, bounds.upper_variance, bounds.lower_variance) == pytest.approx((0, 0, 0))
    assert bounds.effective_draws == pytest.approx(8)


def test_few_draws_that_carry_everything_are_told() -> None:
    nats = torch.full((8, 2), 50.0, dtype=torch.float64)
    nats[3, 1] = 1
    assert law_bounds(nats).effective_draws == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 4 draws"):
        law_bounds(nats[:3])


def test_given_positions_cost_nothing_and_are_read() -> None:
    table, _ = oracle.joint_table(MDLM(), seed=3)
    written = torch.tensor([[False, True, True]]).expand(27, -1)
    texts = torch.tensor(oracle.CLEAN_STATES)
    nats = text_nats(table, Confidence(2, "margin"), texts, [0] * 27, written)
    assert bool((nats[:, 0] == 0).all())
    by_first = (-nats.sum(1)).exp().view(3, 9).sum(1)
    torch.testing.assert_close(by_first, torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "sampler",
    [
        Confidence(4),
        Confidence(4, "margin", delayed_tokens=(1,)),
        Confidence(4, "margin", stop_entropy=0.1),
        Threshold(),
        JointThreshold(),
        ReMDM(4),
        Blockwise(2, Threshold()),
    ],
    ids=repr,
)
def test_laws_that_are_not_known_are_refused(sampler: Sampler) -> None:
    denoiser = tiny_models.tiny_denoiser(MDLM(), size=4, mask=3, length=4)
    with pytest.raises(ValueError, match="cannot be computed"):
        text_nats(denoiser, sampler, TEXTS[:2], [0, 1])


def test_so_are_models_whose_tokens_decide_when_they_are_written() -> None:
    denoiser = tiny_models.tiny_denoiser(D3PM(), size=4, mask=3, length=4)
    with pytest.raises(ValueError, match="do not sum to one"):
        text_nats(denoiser, Ancestral(3), TEXTS[:2], [0, 1])
