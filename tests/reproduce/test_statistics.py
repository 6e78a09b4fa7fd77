"""Verdicts on known figures."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from unmask.reproduce import Estimate, Verdict
from unmask.reproduce._statistics import below, p_below, same
from unmask.reproduce._vocabulary import Measurement, Results, collect_results, summarize

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


def results(**rows: list[float]) -> Results:
    return {
        (row, "nats"): {seed: Estimate(value) for seed, value in enumerate(values, start=1)}
        for row, values in rows.items()
    }


def verdict_below(*rows: str, paired: bool = False, **values: list[float]) -> Verdict:
    return below("", *rows, column="nats", paired=paired).test(results(**values))


def test_known_p_values() -> None:
    """By hand: differences -1, -2, -3 have mean -2 and standard error 1/sqrt(3), so t = -3.46 with two degrees."""
    p = p_below([1, 2, 3], [2, 4, 6], paired=True)
    t = 2 * math.sqrt(3)
    assert p == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))  # the distribution of t with two degrees
    for paired, test in ((True, scipy.stats.ttest_rel), (False, partial(scipy.stats.ttest_ind, equal_var=False))):
        a, b = [1.0, 2.5, 3.0, 0.5], [2.0, 4.0, 6.0, 0.0]
        assert p_below(a, b, paired) == pytest.approx(test(a, b, alternative="less").pvalue)


def test_clear_figures_decide() -> None:
    low, high = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9]
    assert verdict_below("a", "b", a=low, b=high).outcome == "reproduced"
    assert verdict_below("a", "b", a=high, b=low).outcome == "refuted"
    assert verdict_below("a", "b", a=low, b=[1.05, 1.0, 0.95]).outcome == "undecided"


def test_one_seed_decides_nothing() -> None:
    for verdict in (verdict_below("a", "b", a=[1.0], b=[2.0, 2.0]), verdict_below("a", "b", a=[1.0, 1.1])):
        assert verdict.outcome == "undecided"
    assert "b is missing" in verdict_below("a", "b", a=[1.0, 1.1]).evidence


def test_a_chain_needs_every_link_and_one_refuted_link_refutes_it() -> None:
    low, middle, high = [1.0, 1.1, 0.9], [2.0, 2.1, 1.9], [3.0, 3.1, 2.9]
    assert verdict_below("a", "b", "c", a=low, b=middle, c=high).outcome == "reproduced"
    assert verdict_below("a", "b", "c", a=low, b=high, c=middle).outcome == "refuted"
    assert verdict_below("a", "b", "c", a=low, b=middle, c=[2.0, 2.2, 1.8]).outcome == "undecided"


def test_pairs_see_what_spread_hides() -> None:
    """Seeds differ by far more than the two rows do, but always in the same direction."""
    a, b = [1.0, 5.0, 9.0, 3.0], [1.1, 5.12, 9.09, 3.1]
    assert verdict_below("a", "b", a=a, b=b).outcome == "undecided"
    assert verdict_below("a", "b", a=a, b=b, paired=True).outcome == "reproduced"


def test_the_same_within_a_margin() -> None:
    def outcome(a: list[float], b: list[float]) -> str:
        return same("", "a", ["b"], column="nats", margin=0.1).test(results(a=a, b=b)).outcome

    near, far = [1.0, 1.01, 0.99], [1.3, 1.31, 1.29]
    assert outcome(near, [1.01, 1.02, 1.0]) == "reproduced"
    assert outcome(near, far) == "refuted"
    assert outcome(near, [1.0, 1.4, 0.7]) == "undecided"
    assert outcome(near, near) == "reproduced"


@given(VALUES, VALUES)
def test_a_claim_and_its_opposite_are_never_both_reproduced(a: list[float], b: list[float]) -> None:
    one, other = verdict_below("a", "b", a=a, b=b), verdict_below("b", "a", a=a, b=b)
    assert (one.outcome, other.outcome) in (
        ("reproduced", "refuted"),
        ("refuted", "reproduced"),
        ("undecided", "undecided"),
    )
    assert (one.p_reproduced, one.p_refuted) == (other.p_refuted, other.p_reproduced)


@given(VALUES, st.floats(-50, 50), st.floats(0.1, 10))
def test_verdicts_do_not_depend_on_origin_or_unit(a: list[float], shift: float, scale: float) -> None:
    b = [value + 1 for value in reversed(a)]
    moved = [scale * value + shift for value in a], [scale * value + shift for value in b]
    before, after = p_below(a, b, paired=False), p_below(*moved, paired=False)
    assert after == pytest.approx(before, abs=1e-6)


def test_tests_err_as_often_as_they_say() -> None:
    """Of 600 pairs of equal methods, one in twenty is called better, give or take four standard errors."""
    source = random.Random(0)
    draws = [[[source.gauss(0, 1) for _ in range(3)] for _ in range(2)] for _ in range(600)]
    for paired in (False, True):
        wrong = sum(p_below(a, b, paired) < 0.05 for a, b in draws)
        assert wrong < 30 + 4 * math.sqrt(600 * 0.05 * 0.95)
        assert paired is False or wrong > 30 - 4 * math.sqrt(600 * 0.05 * 0.95)  # Welch's is conservative for few


def test_figures_are_means_over_seeds() -> None:
    cells = [Measurement("t", "m", seed, {"m": {"nats": Estimate(value, 9.0)}}) for seed, value in ((2, 3.0), (1, 1.0))]
    seeds = collect_results(cells)["m", "nats"]
    assert list(seeds) == [1, 2]
    assert summarize(seeds) == Estimate(2.0, 1.0)
    assert summarize({1: Estimate(1.0, 9.0)}) == Estimate(1.0, 9.0)
