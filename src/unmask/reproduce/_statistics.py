"""Tests on seeds: is one method below another, are two the same within a margin.

A claim is *reproduced* if the opposite is rejected at the 5 % level, *refuted* if the claim itself is, and else
*undecided at this scale*. Two trainings are compared by Welch's t-test over seeds, two measurements of the same models
by the paired one. One seed decides nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeAlias

from unmask.io.errors import import_optional
from unmask.report.formatting import format_estimate
from unmask.reproduce._vocabulary import Claim, Results, Verdict, summarize

_Test: TypeAlias = Callable[[Results], tuple[float, float]]
_ROUNDING = 1e-12
"""A standard error of no more than this share of the values is none."""
_WELCH, _PAIRED = "Welch's t-test over seeds", "paired t-test over seeds"


def below(text: str, *rows: str, column: str, paired: bool = False, factor: float = 1.0) -> Claim:
    """The claim that each row is below the next one; with `factor`, below that multiple of it."""
    tests = [_below(first, second, column, paired, factor) for first, second in itertools.pairwise(rows)]
    name = f"one-sided {_PAIRED if paired else _WELCH} for each pair, all at 5 %"
    return Claim(text, _all_of(tests, rows, column), name)


def same(text: str, first: str, others: Sequence[str], *, column: str, margin: float, paired: bool = False) -> Claim:
    """The claim that a row differs from each of the others by less than `margin`."""
    tests = [_same(first, other, column, margin, paired) for other in others]
    name = f"two one-sided tests of equivalence ({_PAIRED if paired else _WELCH}), margin {margin:g}, at 5 %"
    return Claim(text, _all_of(tests, (first, *others), column), name)


def p_below(first: Sequence[float], second: Sequence[float], paired: bool) -> float:
    """The p-value of the one-sided test that the mean of `first` is below that of `second`."""
    groups = [[a - b for a, b in zip(first, second, strict=True)]] if paired else [first, second]
    difference = statistics.fmean(first) - statistics.fmean(second)
    variances = [statistics.variance(group) / len(group) for group in groups]
    error = math.sqrt(sum(variances))
    if error <= _ROUNDING * max(map(abs, [*first, *second])):  # no spread: the sign decides
        return 0.0 if difference < 0 else 1.0
    # Welch and Satterthwaite's degrees of freedom; of a single group, n - 1.
    shares = [variance / sum(variances) for variance in variances]
    degrees = 1 / sum(share**2 / (len(group) - 1) for share, group in zip(shares, groups, strict=True))
    return float(import_optional("scipy.stats", "reproduce").t.cdf(difference / error, degrees))


def _below(first: str, second: str, column: str, paired: bool, factor: float) -> _Test:
    """The p-values of a claim and of its opposite."""

    def test(results: Results) -> tuple[float, float]:
        a, b = _values(results, first, second, column, paired)
        if min(len(a), len(b)) < 2:
            return 1.0, 1.0
        b = [factor * value for value in b]
        return p_below(a, b, paired), p_below(b, a, paired)

    return test


def _same(first: str, second: str, column: str, margin: float, paired: bool) -> _Test:
    """Equal means |difference| < margin: both one-sided hypotheses must be rejected."""

    def test(results: Results) -> tuple[float, float]:
        a, b = _values(results, first, second, column, paired)
        if min(len(a), len(b)) < 2:
            return 1.0, 1.0
        lower, higher = [value - margin for value in b], [value + margin for value in b]
        p_same = max(p_below(lower, a, paired), p_below(a, higher, paired))
        return p_same, min(1.0, 2 * min(p_below(a, lower, paired), p_below(higher, a, paired)))

    return test


def _all_of(tests: Sequence[_Test], rows: Sequence[str], column: str) -> Callable[[Results], Verdict]:
    """All must hold (the largest p-value); one that is refuted refutes them all (Bonferroni)."""

    def verdict(results: Results) -> Verdict:
        p_reproduced, p_refuted = zip(*(test(results) for test in tests), strict=True)
        entries = ((row, results.get((row, column))) for row in rows)
        shown = (f"{row} {format_estimate(*summarize(seeds)) if seeds else 'is missing'}" for row, seeds in entries)
        return Verdict(max(p_reproduced), min(1.0, len(tests) * min(p_refuted)), f"{column}: {', '.join(shown)}")

    return verdict


def _values(results: Results, first: str, second: str, column: str, paired: bool) -> tuple[list[float], list[float]]:
    """The values of both rows; if paired, of the seeds that both have."""
    left, right = results.get((first, column), {}), results.get((second, column), {})
    common = [seed for seed in left if seed in right]
    a = [left[seed].value for seed in (common if paired else left)]
    b = [right[seed].value for seed in (common if paired else right)]
    return a, b
