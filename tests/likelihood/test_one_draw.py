"""Mean and variance of one draw of the bound, against integrals over all times and maskings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny_models
from likelihood.test_step_bounds import Stream
from oracle import (
    MASK,
    STATES,
    State,
    TableDenoiser,
    continuous_bound,
    maskings,
    probabilities,
    random_table,
)
from unmask.data.loader import Loader, Wrapped
from unmask.diffusion.schedule import Cosine, LogLinear, Polynomial, Schedule
from unmask.likelihood.one_draw import (
    TIME_SAMPLINGS,
    OneDrawConfig,
    _draw_noise,
    _one_draw_bits,
    _summarize,
    one_draw_stats,
)
from unmask.objectives import MDLM, BlockDiffusion, NextToken
from unmask.types import Batch

TEXTS: list[State] = [(2, 0, 1), (0, 0, 2), (1, 1, 1), (1, 2, 0)]
BITS = 1 / (3 * math.log(2))
SQUARE = Polynomial(2.0)


def moments(table: TableDenoiser, schedule: Schedule, x: State) -> Callable[[float], tuple[float, float]]:
    """u -> (E[bits | u], E[bits^2 | u]) over all maskings at t = u; the table does not depend on the time."""
    prediction = probabilities(table, 0.5)

    def at(u: float) -> tuple[float, float]:
        t = torch.tensor(u, dtype=torch.float64)
        alpha, weight = schedule.alpha(t).item(), schedule.weight(t).item()
        first = second = 0.0
        for z, p in maskings(x, alpha):
            line = prediction[STATES.index(z)]
            nll = sum(-math.log(line[place, x[place]]) for place in range(3) if z[place] == MASK)
            first += p * BITS * weight * nll
            second += p * (BITS * weight * nll) ** 2
        return first, second

    return at


def integrate(function: Callable[[float], float], low: float, high: float, nodes: int = 24) -> float:
    points, weights = np.polynomial.legendre.leggauss(nodes)
    middle, half = (low + high) / 2, (high - low) / 2
    return half * sum(w * function(middle + half * p) for p, w in zip(points.tolist(), weights.tolist(), strict=True))


def batch_of(texts: list[State], n: int) -> Batch:
    return Batch(torch.tensor([texts[i % len(texts)] for i in range(n)]))


def draws(schedule: Schedule | None, sampling: str, texts: list[State], n: int, replicates: int) -> np.ndarray:
    """Bits [replicates, n], all from one call."""
    objective = MDLM(schedule=SQUARE if schedule is None else schedule)
    config = OneDrawConfig(schedule=schedule, time_sampling=sampling)
    table = random_table(MDLM(schedule=SQUARE), drift=0)
    batch = batch_of(texts, n)
    random = np.random.default_rng(0)
    noise = [_draw_noise(batch, random, config) for _ in range(replicates)]
    rows = Batch(batch.tokens.repeat(replicates, 1))
    bits = _one_draw_bits(table, objective, rows, *(torch.cat(each) for each in zip(*noise, strict=True)))
    return bits.view(replicates, n).numpy()


@pytest.mark.parametrize("schedule", [SQUARE, Polynomial(3.0)], ids=repr)
@pytest.mark.parametrize("sampling", TIME_SAMPLINGS)
def test_mean_and_variance_over_texts_are_the_enumerated_ones(schedule: Schedule, sampling: str) -> None:
    """The variance of a draw for a text that is itself drawn: within texts, and between their bounds."""
    table = random_table(MDLM(schedule=SQUARE), drift=0)
    at = [moments(table, schedule, x) for x in TEXTS]
    first = [integrate(lambda u, each=each: each(u)[0], 0, 1) for each in at]  # type: ignore[misc]
    second = [integrate(lambda u, each=each: each(u)[1], 0, 1) for each in at]  # type: ignore[misc]
    for x, bits in zip(TEXTS, first, strict=True):
        assert math.isclose(bits, continuous_bound(table, schedule, x) * BITS, rel_tol=1e-6)
    expected_mean = float(np.mean(first))
    expected_variance = float(np.mean(second)) - expected_mean**2
    found = _summarize(draws(schedule, sampling, TEXTS, 1000, 24))
    assert abs(found.mean - expected_mean) < 4 * found.standard_error
    assert abs(found.variance - expected_variance) < 4 * found.variance_error
    assert found.variance_error < 0.1 * expected_variance


def test_the_error_of_a_batch_is_the_enumerated_one_for_each_sampling_of_times() -> None:
    """n draws of one text: its variance at a given time, and what the sampling leaves of the times' variance."""
    n, x = 8, TEXTS[0]
    at = moments(random_table(MDLM(schedule=SQUARE), drift=0), SQUARE, x)

    def mean(u: float) -> float:
        return at(u)[0]

    total = integrate(mean, 0, 1)
    second = integrate(lambda u: at(u)[1], 0, 1)
    between = integrate(lambda u: mean(u) ** 2, 0, 1)
    strata = [n * integrate(mean, i / n, (i + 1) / n) for i in range(n)]
    shifted = integrate(lambda o: float(np.mean([mean((i + o) / n) for i in range(n)])) ** 2, 0, 1)
    expected = {
        "independent": (second - total**2) / n,
        "own-offset": (second - float(np.mean(np.square(strata)))) / n,
        "shared-offset": (second - between) / n + shifted - total**2,
    }
    assert expected["shared-offset"] < expected["independent"]
    assert expected["own-offset"] < expected["independent"]
    for sampling, variance in expected.items():
        bits = draws(None, sampling, [x], n, 4000).mean(1)
        error = math.sqrt(2 / len(bits)) * 1.5  # of a variance, for tails somewhat heavier than a normal one's
        assert abs(bits.var(ddof=1) / variance - 1) < 4 * error, sampling


def test_times_are_uniform_and_stratified() -> None:
    random = np.random.default_rng(0)
    for sampling, sample in TIME_SAMPLINGS.items():
        u = np.stack([sample(random, 10) for _ in range(4000)])
        assert ((u >= 0) & (u < 1)).all()
        assert np.abs(u.mean(0) - 0.5).max() < 4 * math.sqrt(1 / 12 / 4000)  # of each text
        counts = np.stack([np.bincount((row * 10).astype(int), minlength=10) for row in u])
        if sampling == "own-offset":
            assert (counts == 1).all()
        if sampling == "shared-offset":
            assert np.allclose(np.diff(np.sort(u, 1), axis=1), 0.1)


def test_the_mean_is_the_same_under_all_schedules_also_for_a_network_with_a_clock() -> None:
    """It is told the time at which its own schedule has as many masks."""
    model = tiny_models.tiny_denoiser(MDLM(schedule=Cosine()), time_conditioned=True)
    loader = Loader(Stream(np.arange(40 * tiny_models.LENGTH) * 7 % 4), Wrapped(tiny_models.LENGTH), batch_size=20)
    config = OneDrawConfig(replicates=20)
    found = {
        schedule: one_draw_stats(model, MDLM(schedule=Cosine()), loader, replace(config, schedule=schedule))
        for schedule in (None, SQUARE, Cosine(eps=0.2), Polynomial(1.5))
    }
    for one, other in itertools.combinations(found.values(), 2):
        assert abs(one.mean - other.mean) < 4 * math.hypot(one.standard_error, other.standard_error)
    assert all(stats.texts == 40 for stats in found.values())
    assert found[None].draw_error == pytest.approx(found[None].standard_error * math.sqrt(20))


def test_the_log_linear_schedule_needs_a_smallest_time() -> None:
    """Its second moment diverges as log(1/t): the squeezed one is finite, and its mean lacks what is below."""
    table = random_table(MDLM(schedule=LogLinear(0.0)), drift=0)
    at, low = moments(table, LogLinear(0.0), TEXTS[0]), 0.05
    tails = [integrate(lambda s: at(math.exp(s))[1] * math.exp(s), math.log(a), 0.0) for a in (1e-2, 1e-4, 1e-6)]
    assert tails[2] - tails[1] == pytest.approx(tails[1] - tails[0], rel=0.1)
    assert tails[2] - tails[1] > 0.1
    squeezed = integrate(lambda u: at(u)[0], low, 1) / (1 - low)
    config = OneDrawConfig(min_u=low)
    batch = batch_of([TEXTS[0]], 8000)
    noise = _draw_noise(batch, np.random.default_rng(0), config)
    assert float(noise[0].min()) >= low
    bits = _one_draw_bits(table, MDLM(schedule=LogLinear(0.0)), batch, *noise)
    found = _summarize(bits.view(16, 500).numpy())
    assert abs(found.mean - squeezed) < 4 * found.standard_error


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="shared-offset"):
        OneDrawConfig(time_sampling="stratified")
    with pytest.raises(ValueError, match="at least 2 windows"):
        OneDrawConfig(windows=1)
    with pytest.raises(ValueError, match="at least 2"):
        OneDrawConfig(replicates=1)
    with pytest.raises(ValueError, match="min_u"):
        OneDrawConfig(min_u=1.0)
    loader = Loader(Stream(np.arange(24) % 4), Wrapped(12), batch_size=2)
    for objective in (NextToken(), BlockDiffusion()):
        with pytest.raises(ValueError, match="MDLM, SEDD and D3PM"):
            one_draw_stats(tiny_models.tiny_denoiser(MDLM()), objective, loader)
    short = Loader(Stream(np.arange(12) % 4), Wrapped(12), batch_size=2)
    with pytest.raises(ValueError, match="needs at least 2 of them"):
        one_draw_stats(tiny_models.tiny_denoiser(MDLM()), MDLM(), short)
