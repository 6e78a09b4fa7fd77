"""What every schedule promises, checked for each member of the union: a new one gets these for free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unmask.diffusion import SCHEDULES
from unmask.diffusion.schedule import (
    Cosine,
    CosineSquared,
    Geometric,
    Hyperbolic,
    IntegratedRate,
    LinearSigma,
    LogLinear,
    Polynomial,
    Schedule,
)


def constant(t: Tensor) -> Tensor:
    return torch.full_like(t, 3.0)


def hazard(t: Tensor) -> Tensor:
    """Diverges at t = 1; alpha = 1 - t."""
    return 1 / (1 - t)


def ramp(t: Tensor) -> Tensor:
    """alpha = exp(-t^2), which leaves 1/e visible at t = 1."""
    return 2 * t


SCHEDULES: list[Schedule] = [
    *(member() for member in SCHEDULES.values() if member is not IntegratedRate),
    IntegratedRate(constant),
    IntegratedRate(hazard),
    IntegratedRate(ramp),
    LogLinear(eps=0),
    Cosine(eps=0),
    CosineSquared(eps=0),
    LinearSigma(sigma_min=0),
    Polynomial(power=0.5),
]


def label(schedule: Schedule) -> str:
    values = (getattr(schedule, field.name) for field in fields(schedule))
    return f"{type(schedule).__name__}({', '.join(getattr(v, '__name__', str(v)) for v in values)})"


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=label)

INTERIOR = torch.linspace(1e-3, 1 - 1e-3, 999, dtype=torch.float64)
WHOLE = torch.linspace(0, 1, 2001, dtype=torch.float64)


@every_schedule
def test_dalpha_is_the_derivative_of_alpha(schedule: Schedule) -> None:
    t = INTERIOR.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.dalpha(INTERIOR), derivative, rtol=1e-8, atol=1e-12)


@every_schedule
def test_alpha_falls_and_is_a_probability(schedule: Schedule) -> None:
    alpha = schedule.alpha(WHOLE)
    assert bool((alpha.diff() <= 0).all())
    assert alpha[0] > alpha[1000] > alpha[-1]  # a constant would pass the line above
    assert alpha.min() >= 0
    assert alpha.max() <= 1


@every_schedule
def test_weight_is_the_rate_of_reveal_of_a_masked_token(schedule: Schedule) -> None:
    alpha, dalpha = schedule.alpha(INTERIOR), schedule.dalpha(INTERIOR)
    # 1 - alpha cancels: 1e-6 at t = 1e-3 for the flattest start has lost ten of its sixteen digits.
    torch.testing.assert_close(schedule.weight(INTERIOR), -dalpha / (1 - alpha), rtol=1e-8, atol=0)


@every_schedule
def test_float32_is_finite_and_signed_right_up_to_both_ends(schedule: Schedule) -> None:
    near = [1e-38, 1e-12, 1e-8, 1e-7, 1e-4]
    t = torch.tensor([0.0, *near, 0.5, *(1 - e for e in near), 1 - 2**-24, 1.0])
    alpha, dalpha = schedule.alpha(t), schedule.dalpha(t)
    weight, sigma = schedule.weight(t), schedule.sigma(t)
    for values in (alpha, dalpha, weight, sigma):
        assert values.dtype == torch.float32
        assert bool(values.isfinite().all())
    assert bool(((alpha >= 0) & (alpha <= 1) & (dalpha <= 0) & (weight >= 0) & (sigma >= 0)).all())


@every_schedule
def test_float32_weight_agrees_with_float64(schedule: Schedule) -> None:
    edge = torch.logspace(-5, -1, 200)
    t = torch.cat([edge, torch.linspace(0.1, 0.9, 200), 1 - edge])
    # Relative, because the weight spans many orders of magnitude and multiplies the loss. The absolute
    # part is for CosineSquared, whose weight goes to 0 at t = 1: there the rounding of pi t/2 itself (1e-7)
    # is 1 % of a weight of 5e-5, beside an average weight of order one.
    torch.testing.assert_close(schedule.weight(t).double(), schedule.weight(t.double()), rtol=1e-4, atol=1e-6)


@every_schedule
def test_inverse_finds_the_time(schedule: Schedule) -> None:
    # Flat stretches limit it: where the slope is 1e-3, alpha's last bit (1e-16) is worth 1e-13 of t.
    torch.testing.assert_close(schedule.inverse(schedule.alpha(INTERIOR)), INTERIOR, rtol=0, atol=1e-11)


@every_schedule
def test_inverse_of_a_level_that_is_never_reached_is_the_nearer_end(schedule: Schedule) -> None:
    ends = schedule.inverse(torch.tensor([1.0, 0.0]))
    assert ends.dtype == torch.float64
    torch.testing.assert_close(ends, torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=0, atol=1e-15)


@every_schedule
def test_sigma_is_minus_log_alpha(schedule: Schedule) -> None:
    expected = -torch.log(schedule.alpha(INTERIOR))
    torch.testing.assert_close(schedule.sigma(INTERIOR), expected, rtol=1e-9, atol=1e-14)


def test_the_rate_of_a_hazard_gives_the_linear_schedule() -> None:
    rate, linear = IntegratedRate(hazard), LogLinear(eps=0)
    for name in ("alpha", "dalpha", "weight", "sigma"):
        made, known = getattr(rate, name)(INTERIOR), getattr(linear, name)(INTERIOR)
        torch.testing.assert_close(made, known, rtol=1e-9, atol=0)
    # At the very end the quadrature meets the divergence; what stays visible must not matter.
    assert rate.alpha(WHOLE)[-1] < 1e-6


def test_a_constant_rate_gives_an_exponential() -> None:
    torch.testing.assert_close(IntegratedRate(constant).alpha(WHOLE), torch.exp(-3 * WHOLE), rtol=1e-12, atol=0)


def test_a_rising_rate_gives_a_bell() -> None:
    torch.testing.assert_close(IntegratedRate(ramp).alpha(WHOLE), torch.exp(-WHOLE.square()), rtol=1e-12, atol=0)


def test_a_rate_may_be_infinite_at_the_start() -> None:
    # alpha = exp(-sqrt(t)); the quadrature misses 2e-4 beside the divergence, but nothing may be NaN.
    fast = IntegratedRate(lambda t: 0.5 / t.sqrt())
    assert float(fast.alpha(torch.zeros(1))) == 1
    torch.testing.assert_close(fast.alpha(WHOLE), torch.exp(-WHOLE.sqrt()), rtol=0, atol=1e-3)


def test_a_rate_that_changes_at_once_is_integrated() -> None:
    # No quadrature is exact across a jump: 1/256 of the range holds it, at a fraction of its weight.
    late = IntegratedRate(lambda t: torch.where(t < 0.3, 0.0, 5.0))
    torch.testing.assert_close(late.alpha(WHOLE), torch.exp(-5 * (WHOLE - 0.3).clamp(min=0)), rtol=0, atol=5e-3)


@pytest.mark.parametrize("make", [Geometric, LinearSigma])
def test_sigma_runs_between_its_ends(make: Callable[[float, float], Schedule]) -> None:
    ends = make(0.5, 3.0).sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([0.5, 3.0], dtype=torch.float64))


def test_hyperbolic_has_a_fast_start() -> None:
    """One write-up calls its formula a slow start; half of the tokens are gone after t = 1e-4."""
    assert Hyperbolic(speed=10).alpha(torch.tensor(1e-4)) < 0.5


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("loglinear", LogLinear(eps=1e-3)),
        ("cosine", Cosine(eps=1e-3)),
        ("cosinesqr", CosineSquared(eps=1e-3)),
        ("geometric", Geometric(1e-4, 20)),
        ("linear", LinearSigma(1e-4, 20)),
    ],
)
def test_published_noise(golden: Path, name: str, schedule: Schedule) -> None:
    expected = load_file(golden / "mdlm_tiny" / "expected.safetensors")
    t = expected["schedule.t"].double()
    sigma, dsigma = schedule.sigma(t), -schedule.dalpha(t) / schedule.alpha(t)
    # The published numbers are float32 logs of 1 - small: they are off by 1e-7 absolutely near t = 0,
    # and 1e-4 relatively where alpha is small.
    torch.testing.assert_close(sigma, expected[f"schedule.{name}.sigma"].double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dsigma, expected[f"schedule.{name}.dsigma"].double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [LogLinear, Cosine, CosineSquared])
@pytest.mark.parametrize("eps", [1.0, -0.25, math.nan])
def test_eps_outside_its_range_is_refused(make: Callable[[float], Schedule], eps: float) -> None:
    with pytest.raises(ValueError, match=rf"^eps, .* must be in \[0, 1\); got {eps}$"):
        make(eps)


@pytest.mark.parametrize("make", [Geometric, LinearSigma])
@pytest.mark.parametrize(("low", "high"), [(2.5, 0.5), (2.5, 2.5), (-0.5, 2.5)])
def test_sigma_that_does_not_rise_is_refused(make: Callable[[float, float], Schedule], low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"needs 0 <=? sigma_min < sigma_max") as error:
        make(low, high)
    assert f"sigma_min={low}, sigma_max={high}" in str(error.value)


def test_geometric_needs_a_sigma_min() -> None:
    with pytest.raises(ValueError, match=r"sigma_min=0, sigma_max=20\) needs 0 < sigma_min < sigma_max$"):
        Geometric(0, 20)


@pytest.mark.parametrize("make", [Polynomial, Hyperbolic])
@pytest.mark.parametrize("value", [0.0, -1.5, math.nan])
def test_power_and_speed_must_be_positive(make: Callable[[float], Schedule], value: float) -> None:
    with pytest.raises(ValueError, match=rf"needs (power > 0|a speed above 0 and up to 40); got {value}$"):
        make(value)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate beta\(t\) must be finite and at least 0 .*-0\.25"):
        IntegratedRate(lambda t: torch.full_like(t, -0.25))


def test_an_undefined_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate beta\(t\) must be finite and at least 0 .*nan"):
        IntegratedRate(lambda t: t * math.nan)
