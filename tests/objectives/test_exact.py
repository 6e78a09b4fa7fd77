"""Bounds against enumeration: the estimator's mean, its relation to -log p, and objectives to each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from oracle import (
    CLEAN_STATES,
    LINEAR,
    MASK,
    STATES,
    State,
    TableDenoiser,
    ancestral_distribution,
    continuous_bound,
    discrete_bound,
    joint_table,
    maskings,
    probabilities,
    random_order_distribution,
    random_table,
)
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
from unmask.diffusion.time_sampling import HistogramTimes, PowerTimes
from unmask.objectives import D3PM, MDLM, SEDD
from unmask.objectives.base import MaskedObjective, _normalization_penalty
from unmask.types import Batch

SCHEDULES: list[Schedule] = [
    LINEAR,
    LogLinear(eps=0.1),  # its ends are far from complete, so prior and reconstruction count
    Cosine(),
    CosineSquared(),
    Geometric(sigma_min=0.05, sigma_max=3.0),
    LinearSigma(sigma_min=0.01, sigma_max=5.0),
    Polynomial(power=3),
    Hyperbolic(speed=0.7),
    IntegratedRate(lambda t: 4 * t),
]
X: State = (2, 0, 1)

Stepped: TypeAlias = type[MDLM | D3PM]


def estimate(objective: MaskedObjective, table: object, x: State, n: int = 40_000) -> tuple[float, float]:
    """Mean nats of a sequence over n draws and its standard error, from 16 independent stratified batches."""
    batch = Batch(torch.tensor([x]).expand(n // 16, -1))
    means = []
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        nats = objective.token_nll(table, batch, generator)  # type: ignore[arg-type]
        means.append(float(nats.sum(1).mean()))
    mean = sum(means) / 16
    return mean, math.sqrt(sum((m - mean) ** 2 for m in means) / 15 / 16)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("kind", [MDLM, SEDD, D3PM], ids=lambda k: k.__name__)
def test_the_estimators_mean_is_the_exact_continuous_bound(kind: type[MaskedObjective], schedule: Schedule) -> None:
    objective = kind(schedule=schedule)  # type: ignore[arg-type]
    if isinstance(objective, D3PM):
        objective = replace(objective, steps=None, carry_over=True)
    table = random_table(objective)
    mean, error = estimate(objective, table, X)
    assert error < 0.3  # of about 4 nats: enough to notice a lost term
    assert abs(mean - continuous_bound(table, schedule, X)) < 4 * error


@pytest.mark.parametrize("schedule", [LINEAR, Cosine(), LogLinear(eps=0.1)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("kind", [MDLM, SEDD], ids=lambda k: k.__name__)
def test_exact_counts_have_the_same_mean(kind: type[MaskedObjective], schedule: Schedule) -> None:
    """And less noise: k of n tokens are hidden, not as many as coins happen to hide."""
    coins = kind(schedule=schedule)  # type: ignore[arg-type]
    table = random_table(coins, drift=0.0)
    counts = replace(coins, exact_mask_counts=True)
    mean, error = estimate(counts, table, X)
    assert error < 0.03
    assert abs(mean - continuous_bound(table, schedule, X)) < 4 * error


def test_exact_counts_hide_each_number_of_tokens_equally_often() -> None:
    """Of the tokens that count only: the last of each row is given."""
    seen = []

    class Spy(TableDenoiser):
        def __call__(
            self, z: torch.Tensor, t: torch.Tensor, positions: Any, *rest: object, **options: object
        ) -> torch.Tensor:
            seen.append((z == MASK).sum(1))
            assert torch.equal(positions.mask(), z == MASK)
            return super().__call__(z, t, positions, *rest, **options)

    table = random_table(MDLM(), drift=0.0)
    spy = Spy(table.logits, table.drift, table.objective)
    frozen = torch.tensor([[False, False, True]]).expand(10, -1)
    batch = Batch(torch.tensor([X]).expand(10, -1), prompt_mask=frozen)
    MDLM(exact_mask_counts=True).token_nll(spy, batch, torch.Generator().manual_seed(0))
    assert sorted(seen[0].tolist()) == [1] * 5 + [2] * 5


def test_exact_counts_need_a_network_without_a_clock() -> None:
    batch = Batch(torch.tensor([X]))
    with pytest.raises(ValueError, match="not conditioned on time"):
        MDLM(exact_mask_counts=True).token_nll(random_table(MDLM()), batch, torch.Generator())
    with pytest.raises(ValueError, match="does not depend on alpha"):
        D3PM(exact_mask_counts=True)
    with pytest.raises(ValueError, match="continuous time"):
        MDLM(exact_mask_counts=True, steps=10)


def test_a_row_that_has_nothing_to_hide_costs_nothing() -> None:
    batch = Batch(torch.tensor([X, X]), prompt_mask=torch.tensor([[True] * 3, [False] * 3]))
    nats = MDLM(exact_mask_counts=True).token_nll(random_table(MDLM(), drift=0.0), batch, torch.Generator())
    assert nats[0].tolist() == [0, 0, 0]
    assert nats[1].sum() > 0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("kind", [MDLM, D3PM])
def test_the_estimators_mean_is_the_exact_bound_of_t_steps(
    steps: int, schedule: Schedule, kind: type[MDLM | D3PM]
) -> None:
    objective = kind(schedule=schedule, steps=steps, carry_over=True)
    table = random_table(objective)
    mean, error = estimate(objective, table, X, n=16_000)
    assert abs(mean - discrete_bound(table, schedule, steps, X)) < 4 * error + 1e-6


@pytest.mark.parametrize("times", [PowerTimes(2.0), PowerTimes(0.7), HistogramTimes((5.0, 2.0, 1.0, 1.0))])
def test_proposals_of_times_do_not_move_the_mean(times: PowerTimes | HistogramTimes) -> None:
    objective = MDLM(schedule=LINEAR, times=times)
    table = random_table(objective)
    mean, error = estimate(objective, table, X)
    assert abs(mean - continuous_bound(table, LINEAR, X)) < 4 * error


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("schedule", [LINEAR, LogLinear(eps=0.1), Geometric(0.05, 3.0)], ids=repr)
@pytest.mark.parametrize("kind", [MDLM, D3PM])
def test_t_steps_bound_what_the_sampler_with_t_steps_draws(
    steps: int, schedule: Schedule, kind: type[MDLM | D3PM]
) -> None:
    table = random_table(kind(schedule=schedule, steps=steps, carry_over=True))
    drawn = ancestral_distribution(table, schedule, steps)
    slack = [discrete_bound(table, schedule, steps, x) + math.log(drawn[x]) for x in CLEAN_STATES]
    assert min(slack) > -1e-9
    if steps == 1 and kind is MDLM:  # a single step writes all tokens at once: the bound is exact
        assert max(slack) < 1e-9
    else:
        assert max(slack) > 1e-3


def test_the_continuous_bound_bounds_what_first_hitting_draws() -> None:
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    drawn = random_order_distribution(table)
    slack = [continuous_bound(table, LINEAR, x) + math.log(drawn[x]) for x in CLEAN_STATES]
    assert min(slack) > 0
    assert max(slack) > 1e-2


def test_the_bound_is_exact_for_a_network_that_knows_the_joint_distribution() -> None:
    """True conditionals multiply to the same p(x) in every order, so nothing is lost."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    for x in CLEAN_STATES:
        assert math.isclose(continuous_bound(table, LINEAR, x), -math.log(joint[x]), rel_tol=1e-6)
    mean, error = estimate(MDLM(schedule=LINEAR), table, X)
    assert abs(mean + math.log(joint[X])) < 4 * error


def test_the_bound_does_not_depend_on_the_schedule() -> None:
    table = random_table(MDLM(), drift=0)
    exact = {s: continuous_bound(table, s, X) for s in SCHEDULES}
    assert max(exact.values()) - min(exact.values()) < 1e-6
    for schedule in SCHEDULES:
        mean, error = estimate(MDLM(schedule=schedule), table, X)
        assert abs(mean - exact[LINEAR]) < 4 * error


def test_more_steps_tighten_the_bound_towards_continuous_time() -> None:
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    bounds = [discrete_bound(table, LINEAR, steps, X) for steps in (8, 64, 512)]
    limit = continuous_bound(table, LINEAR, X)
    gaps = [abs(bound - limit) for bound in bounds]
    assert gaps[0] > 4 * gaps[1] > 16 * gaps[2]


def test_zero_masking_is_rao_blackwellised_d3pm() -> None:
    """SUBS is D3PM with the mask's mass renormalised away: never worse, on any text, at any step."""
    for seed, x in itertools.product(range(3), CLEAN_STATES[::5]):
        d3pm = random_table(D3PM(schedule=LINEAR, steps=6), seed=seed)
        subs = replace(d3pm, objective=MDLM(schedule=LINEAR, steps=6))
        assert discrete_bound(subs, LINEAR, 6, x) < discrete_bound(d3pm, LINEAR, 6, x)


def test_a_normalised_score_costs_sedd_what_it_costs_mdlm() -> None:
    """Score entropy = SUBS + a price for S != 1: equal where S = 1, dearer elsewhere."""
    subs = random_table(MDLM(schedule=LINEAR))
    clean = subs.logits[:, :, :3].log_softmax(-1) + math.log(3)
    normalised = replace(subs, objective=SEDD(schedule=LINEAR), drift=torch.zeros_like(subs.drift))
    normalised.logits = torch.cat([clean, subs.logits[:, :, 3:]], -1)
    twin = replace(normalised, objective=MDLM(schedule=LINEAR))
    off = replace(normalised, logits=normalised.logits + 0.5)
    exact = continuous_bound(twin, LINEAR, X)
    assert math.isclose(continuous_bound(normalised, LINEAR, X), exact, rel_tol=1e-9)
    # Each of the three tokens is revealed once, and then costs S - 1 - log S with S = e^0.5 too much.
    assert math.isclose(continuous_bound(off, LINEAR, X), exact + 3 * (math.exp(0.5) - 1.5), rel_tol=1e-9)


def test_without_carry_over_copying_is_charged() -> None:
    """D3PM's reconstruction: with alpha(0) = 1 it is -log x_theta(x | x) at every position."""
    objective = MDLM(schedule=LINEAR, steps=4, carry_over=False)
    table = random_table(objective)
    plain = replace(objective, carry_over=True)
    batch = Batch(torch.tensor([X]))
    extra = objective.token_nll(table, batch, torch.Generator().manual_seed(1)) - plain.token_nll(
        table, batch, torch.Generator().manual_seed(1)
    )
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    log_x = table(batch.tokens, torch.zeros(1, 1, dtype=torch.float64), everywhere)
    torch.testing.assert_close(extra[0], -log_x.gather(1, batch.tokens.T)[:, 0])


@pytest.mark.thorough
def test_every_row_of_a_batch_is_unbiased() -> None:
    """Different texts in one batch: each row's mean is its own bound, wherever it stands in the strata."""
    objective, texts = MDLM(schedule=LINEAR), [(2, 0, 1), (0, 0, 2), (1, 1, 1)]
    table = random_table(objective)
    batch = Batch(torch.tensor(texts))
    draws = torch.stack(
        [objective.token_nll(table, batch, torch.Generator().manual_seed(s)).sum(1) for s in range(3000)]
    )
    mean, error = draws.mean(0), draws.std(0) / math.sqrt(len(draws))
    for row, x in enumerate(texts):
        assert abs(float(mean[row]) - continuous_bound(table, LINEAR, x)) < 4 * float(error[row])


def test_without_carry_over_hidden_tokens_of_z_0_are_not_charged_twice() -> None:
    """Where alpha(0) < 1 some tokens of z_0 are masked: the diffusion part counts those."""
    late = Geometric(sigma_min=0.7, sigma_max=3.0)  # alpha(0) = 0.5
    objective = MDLM(schedule=late, carry_over=False)
    table = random_table(objective, drift=0)
    plain, error = estimate(replace(objective, carry_over=True), table, X)
    copying, error_too = estimate(objective, table, X)
    expected = 0.0
    for z, p in maskings(X, math.exp(-0.7)):
        lines = probabilities(table, 0.0)[STATES.index(z)]
        expected -= p * sum(math.log(lines[j][X[j]]) for j in range(3) if z[j] != MASK)
    assert abs(copying - plain - expected) < 4 * (error + error_too)


@pytest.mark.parametrize("jump", [0.0, 1e-30, 1e-10, 1 - 2**-30, 1.0])
def test_the_penalty_is_finite_at_both_ends(jump: float) -> None:
    total = torch.tensor([0.9, 1.0], requires_grad=True)
    value = _normalization_penalty(total, torch.full((2,), jump, dtype=torch.float64))
    value.sum().backward()
    assert value.isfinite().all()
    assert total.grad is not None
    assert total.grad.isfinite().all()
    if jump < 1e-9:
        torch.testing.assert_close(value, total.detach() - 1)
