from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.diffusion import SCHEDULES
from unmask.diffusion.noise_level import alpha_grid, continuous_level, discrete_level
from unmask.diffusion.schedule import Cosine, IntegratedRate, LinearSigma, LogLinear, Polynomial, Schedule
from unmask.diffusion.time_sampling import (
    AnyTimes,
    ClippedTimes,
    HistogramTimes,
    PowerTimes,
    UniformTimes,
    stratified_uniform,
)
from unmask.types import Batch


def hazard(t: Tensor) -> Tensor:
    return 1 / (1 - t)


def ramp(t: Tensor) -> Tensor:
    return 2 * t


SCHEDULES: list[Schedule] = [
    *(member() for member in SCHEDULES.values() if member is not IntegratedRate),
    IntegratedRate(hazard),
    IntegratedRate(ramp),  # 1/e is still visible at t = 1
    LogLinear(eps=0),
    Cosine(eps=0.3),
    LinearSigma(sigma_min=0.5, sigma_max=3),  # neither end is near 0 or 1
    Polynomial(power=0.5),
]

PROPOSALS: list[AnyTimes] = [
    UniformTimes(),
    PowerTimes(),
    PowerTimes(0.5),
    PowerTimes(3.0),
    HistogramTimes((1.0,)),
    HistogramTimes((1.0, 4.0, 2.0, 0.1)),
]


def label(choice: Schedule | AnyTimes) -> str:
    values = (getattr(choice, field.name) for field in fields(choice))
    return f"{type(choice).__name__}({', '.join(getattr(v, '__name__', str(v)) for v in values)})"


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=label)
every_proposal = pytest.mark.parametrize("times", PROPOSALS, ids=label)


def rows_of(rows: int, row_offset: int = 0, global_batch_size: int | None = None) -> Batch:
    return Batch(torch.zeros(rows, 3, dtype=torch.int64), row_offset=row_offset, global_batch_size=global_batch_size)


def midpoints(count: int) -> Tensor:
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count)[:, None]


def integral(f: Callable[[Tensor], Tensor], edges: list[float]) -> float:
    """Gauss-Legendre on each panel; `f` takes and gives [N, 1] as everything about times does."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.legendre.leggauss(20))
    low, high = torch.tensor(edges[:-1]).double(), torch.tensor(edges[1:]).double()
    half = (high - low)[:, None] / 2
    at = low[:, None] + half * (1 + nodes)
    return float((f(at.reshape(-1, 1)).reshape(at.shape) * weights * half).sum())


def test_every_kind_of_proposal_is_tested() -> None:
    assert {type(times) for times in PROPOSALS} | {ClippedTimes} == set(get_args(AnyTimes))


def test_a_part_of_the_time_is_a_curriculum_and_no_proposal() -> None:
    t, importance = ClippedTimes(0.2, 0.6).importance_sample(midpoints(4))
    assert t[:, 0].tolist() == pytest.approx([0.25, 0.35, 0.45, 0.55])
    assert importance[:, 0].tolist() == [1, 1, 1, 1]
    whole = midpoints(4)
    assert torch.equal(ClippedTimes().importance_sample(whole)[0], whole)
    for low, high in ((0.5, 0.5), (-0.1, 1), (0, 1.1)):
        with pytest.raises(ValueError, match="0 <= low < high <= 1"):
            ClippedTimes(low, high)


# Strata


@settings(deadline=None, max_examples=50)
@given(total=st.integers(1, 40), cuts=st.sets(st.integers(1, 39)), offset=st.floats(0, 1, exclude_max=True))
def test_a_split_batch_has_the_times_of_the_whole(total: int, cuts: set[int], offset: float) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < total), total]
    parts = [stratified_uniform(rows_of(high - low, low, total), offset) for low, high in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), stratified_uniform(rows_of(total), offset))


@settings(deadline=None, max_examples=50)
@given(total=st.integers(1, 40), offset=st.floats(0, 1, exclude_max=True))
def test_rows_are_evenly_spaced_on_the_circle(total: int, offset: float) -> None:
    """One row in every stretch of 1/N, wherever the offset puts the first."""
    u = stratified_uniform(rows_of(total), offset)
    assert u.shape == (total, 1)
    assert u.dtype == torch.float64
    assert bool(((u >= 0) & (u < 1)).all())
    gaps = u[:, 0].sort().values.diff()
    torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / total), atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=50)
@given(ranks=st.integers(1, 8), each=st.integers(2, 16), offset=st.floats(0, 1, exclude_max=True))
def test_every_rank_has_early_and_late_rows(ranks: int, each: int, offset: float) -> None:
    """Masks cost time, so no rank's mean time may be far off: at most twice the spread of rows at random."""
    u = stratified_uniform(rows_of(ranks * each), offset).view(ranks, each)
    of_random_rows = (1 / 12 / each) ** 0.5
    assert bool(((u.mean(1) - 0.5).abs() < 2 * of_random_rows).all())


@pytest.mark.parametrize("each", [2, 4, 8, 16])
def test_powers_of_two_are_covered_evenly_by_every_rank(each: int) -> None:
    u = stratified_uniform(rows_of(8 * each), 0.0).view(8, each)
    gaps = u.sort(1).values.diff()
    torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / each))


def test_a_row_goes_everywhere() -> None:
    """Not only all rows together: each one by itself is uniform, or its nats would be biased."""
    offsets = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    u = torch.stack([stratified_uniform(rows_of(4), float(offset))[:, 0] for offset in offsets])
    ordered = u.sort(0).values
    torch.testing.assert_close(ordered, offsets[:, None].expand(-1, 4), atol=2e-3, rtol=0)


# Levels and moments


@every_schedule
@pytest.mark.parametrize("steps", [1, 2, 37])
def test_levels_run_from_one_to_zero(schedule: Schedule, steps: int) -> None:
    level = alpha_grid(schedule, steps)
    grid = torch.arange(steps + 1, dtype=torch.float64) / steps
    assert level.dtype == torch.float64
    assert (float(level[0]), float(level[-1])) == (1, 0)
    assert bool((level.diff() <= 0).all())
    torch.testing.assert_close(level[1:-1], schedule.alpha(grid[1:-1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"^steps must be a whole number from 1 to 1,048,576; got {steps}$"):
        alpha_grid(LogLinear(), steps)


@every_schedule
@pytest.mark.parametrize("steps", [1, 2, 37, 1000])
def test_in_t_steps_each_token_is_revealed_once(schedule: Schedule, steps: int) -> None:
    moment = discrete_level(schedule, steps, midpoints(steps))  # each step once
    share = moment.weight / steps * (1 - moment.alpha)
    assert abs(float(share.sum()) - 1) < 1e-12


def test_a_step_moment_is_the_step_that_u_falls_into() -> None:
    moment = discrete_level(LogLinear(eps=0), 4, torch.tensor([[0.0], [0.3], [0.99], [1.0]]).double())
    assert moment.unmask_prob is not None
    # From t = i/4 back to (i - 1)/4: the level rises by 1/4 of all tokens, of which i/4 are masked.
    assert moment.t[:, 0].tolist() == [0.25, 0.5, 1.0, 1.0]
    assert moment.alpha[:, 0].tolist() == [0.75, 0.5, 0.0, 0.0]
    torch.testing.assert_close(moment.unmask_prob[:, 0], torch.tensor([1, 1 / 2, 1 / 4, 1 / 4]).double())
    torch.testing.assert_close(moment.weight, 4 * moment.unmask_prob)


def test_a_step_in_which_nothing_is_masked_yet_has_a_finite_weight() -> None:
    """At t = 1/1000 this slow start has masked 1e-18 of the tokens, which float64 rounds to none: 0/0."""
    moment = discrete_level(Polynomial(power=6), 1000, torch.zeros(1, 1, dtype=torch.float64))
    assert float(moment.alpha) == 1
    assert bool(moment.weight.isfinite().all())


def test_moments_are_float64() -> None:
    u = midpoints(3)
    for moment in (discrete_level(LogLinear(), 10, u), continuous_level(LogLinear(), u)):
        parts = [part for part in moment if part is not None]
        assert [part.shape for part in parts] == [(3, 1)] * len(parts)
        assert [part.dtype for part in parts] == [torch.float64] * len(parts)


@every_schedule
def test_in_continuous_time_each_token_is_revealed_once(schedule: Schedule) -> None:
    """The integral of weight * P(masked) over u is 1: the loss is a bound, and not a share of one."""

    def density(u: Tensor) -> Tensor:
        moment = continuous_level(schedule, u)
        return moment.weight * (1 - moment.alpha)

    start, end = schedule.alpha(torch.tensor([0.0, 1.0]).double()).tolist()
    # Kinks where the clock starts and stops; panels shrink towards its ends, where a fast start (or the
    # divergence of the hazard) puts much into little.
    fractions = [0.0, *np.logspace(-16, -1, 31), 0.3, 0.5, 0.7, *(1 - np.logspace(-1, -16, 31)), 1.0]
    moving = [1 - start + (start - end) * float(fraction) for fraction in fractions]
    revealed = integral(density, [0.0, *moving, 1.0])
    assert abs(revealed - 1) < 1e-6


@every_schedule
def test_the_clock_runs_between_its_ends_and_the_level_over_all(schedule: Schedule) -> None:
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    moment = continuous_level(schedule, u)
    assert moment.unmask_prob is None
    assert (float(moment.t[0]), float(moment.t[-1])) == (0, 1)
    ends = torch.tensor([1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(moment.alpha[[0, -1], 0], ends, rtol=0, atol=1e-12)
    assert bool((moment.t.diff(dim=0) >= 0).all())
    assert bool((moment.alpha.diff(dim=0) <= 1e-12).all())
    assert bool(moment.weight.isfinite().all())


def test_where_the_clock_stands_still_the_level_moves() -> None:
    """sigma from 1/2 to 3: 39 % of the levels lie before t = 0 and 5 % after t = 1."""
    moment = continuous_level(LinearSigma(0.5, 3), torch.tensor([[0.2], [0.97]]).double())
    assert moment.t[:, 0].tolist() == [0, 1]
    torch.testing.assert_close(moment.alpha[:, 0], torch.tensor([0.8, 0.03]).double())
    torch.testing.assert_close(moment.weight[:, 0], torch.tensor([1 / 0.2, 1 / 0.97]).double())


# Proposals


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "one": (torch.ones_like, 1),
    "t": (lambda t: t, 1 / 2),
    "t^3": (lambda t: t**3, 1 / 4),
    "sin": (lambda t: torch.sin(torch.pi * t), 2 / np.pi),
    "exp(-t)": (lambda t: torch.exp(-t), 1 - np.exp(-1)),
    "early": (lambda t: (t < 0.3).double(), 0.3),
}


@every_proposal
@pytest.mark.parametrize("name", FUNCTIONS)
def test_importance_undoes_the_proposal(times: AnyTimes, name: str) -> None:
    f, expected = FUNCTIONS[name]
    t, importance = times.importance_sample(midpoints(200_000))
    # The midpoint rule is good to 1e-5, but for a power below 1: its importance diverges at u = 0.
    tolerance = 2e-3 if times == PowerTimes(0.5) else 5e-5
    assert float((f(t) * importance).mean()) == pytest.approx(expected, abs=tolerance)


@every_proposal
def test_times_rise_through_the_whole_range(times: AnyTimes) -> None:
    u = torch.cat([torch.linspace(0, 1, 10_001).double(), torch.tensor([1 - 2**-53]).double()])[:, None]
    t, importance = times.importance_sample(u)
    assert t.shape == importance.shape == u.shape
    assert bool(((t >= 0) & (t <= 1)).all())
    assert float(t[0]) == 0
    assert float(t[-1]) == pytest.approx(1)
    assert bool((t[:-1].diff(dim=0) > 0).all())
    assert bool((importance > 0).all())
    assert bool(importance.isfinite().all())


@every_proposal
def test_the_density_of_times_integrates_to_one(times: AnyTimes) -> None:
    cells = 100_000
    edges, _ = times.importance_sample(torch.linspace(0, 1, cells + 1).double()[:, None])
    _, importance = times.importance_sample(midpoints(cells))
    assert float((edges.diff(dim=0) / importance).sum()) == pytest.approx(1, abs=1e-4)


def test_a_histogram_draws_its_cells_by_their_shares() -> None:
    t, importance = HistogramTimes((1.0, 3.0)).importance_sample(midpoints(1000))
    assert int((t < 0.5).sum()) == 250
    assert sorted(set(importance[:, 0].tolist())) == pytest.approx([2 / 3, 2])


def test_a_power_above_one_looks_more_often_near_the_data() -> None:
    t, _ = PowerTimes(2.0).importance_sample(midpoints(1000))
    assert int((t < 0.25).sum()) == 500


@pytest.mark.parametrize("power", [0.0, -1.5, float("nan")])
def test_a_power_that_is_not_positive_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match=f"^times need a power > 0; got {power}$"):
        PowerTimes(power)


@pytest.mark.parametrize("shares", [(), (1.0, 0.0), (2.0, -1.5), (1.0, float("nan"))])
def test_a_cell_that_is_never_drawn_is_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="needs a weight > 0; got") as error:
        HistogramTimes(shares)
    assert str(shares) in str(error.value)
