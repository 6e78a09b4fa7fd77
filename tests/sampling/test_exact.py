"""Samplers' output distributions against enumeration. Seeds are fixed: a p-value is one number, not luck."""

from __future__ import annotations

import pytest

from oracle import (
    ALL_MASKED,
    CLEAN_STATES,
    LINEAR,
    MASK,
    State,
    ancestral_distribution,
    chi_square_p_value,
    joint_table,
    point_mass,
    random_order_distribution,
    random_table,
    reverse_step,
    sample_counts,
    text_distribution,
)
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.schedule import Cosine, Geometric, Schedule
from unmask.objectives import D3PM, MDLM, SEDD
from unmask.sampling import (
    Ancestral,
    Confidence,
    EntropyBounded,
    FirstHitting,
    RandomOrder,
    ReMDM,
    Sampler,
)
from unmask.sampling.confidence import Entropy, Margin
from unmask.sampling.remdm import Cap, Loop, Rescale

pytestmark = pytest.mark.thorough

PARTLY: State = (MASK, 1, MASK)
REJECT = 1e-3


@pytest.mark.parametrize("canvas", [ALL_MASKED, PARTLY], ids=["blank", "infill"])
@pytest.mark.parametrize(("batch", "n"), [(1, 1000), (64, 6400)])
@pytest.mark.parametrize(
    ("schedule", "steps"), [(LINEAR, 1), (LINEAR, 4), (Cosine(), 3), (Geometric(), 5), (LINEAR, 100)]
)
def test_ancestral_is_the_enumerated_chain(schedule: Schedule, steps: int, batch: int, n: int, canvas: State) -> None:
    table = random_table(MDLM(schedule=schedule))
    seen = sample_counts(Ancestral(steps), table, n, batch, canvas)
    assert chi_square_p_value(seen, ancestral_distribution(table, schedule, steps, canvas)) > REJECT


def test_the_chi_square_would_notice_other_steps() -> None:
    """The test above can fail: four steps are not eight, and telling the network another time shows."""
    table = random_table(MDLM(schedule=LINEAR))
    seen = sample_counts(Ancestral(4), table, 6400, 64)
    assert chi_square_p_value(seen, ancestral_distribution(table, LINEAR, 8)) < REJECT
    assert (
        chi_square_p_value(seen, ancestral_distribution(random_table(MDLM(schedule=LINEAR), drift=0.5), LINEAR, 4))
        < REJECT
    )


@pytest.mark.parametrize("objective", [SEDD(schedule=LINEAR), D3PM(schedule=LINEAR)], ids=["sedd", "d3pm"])
@pytest.mark.parametrize("canvas", [ALL_MASKED, PARTLY], ids=["blank", "infill"])
def test_free_log_x_goes_through_the_same_chain(objective: SEDD | D3PM, canvas: State) -> None:
    """SEDD's analytic sampler and D3PM: r x_v, and masked with what is left."""
    table = random_table(objective)
    seen = sample_counts(Ancestral(4), table, 6400, 64, canvas)
    assert chi_square_p_value(seen, ancestral_distribution(table, LINEAR, 4, canvas)) > REJECT


@pytest.mark.parametrize("canvas", [ALL_MASKED, PARTLY], ids=["blank", "infill"])
@pytest.mark.parametrize(("batch", "n"), [(1, 1000), (64, 6400)])
def test_first_hitting_is_the_limit_of_many_steps(batch: int, n: int, canvas: State) -> None:
    """With a table that drifts with time, so that the times at which it is asked matter too."""
    table = random_table(MDLM(schedule=LINEAR))
    limit = ancestral_distribution(table, LINEAR, 400, canvas)
    assert chi_square_p_value(sample_counts(FirstHitting(), table, n, batch, canvas), limit) > REJECT


def test_without_a_clock_first_hitting_is_a_random_order() -> None:
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    exact, limit = random_order_distribution(table), ancestral_distribution(table, LINEAR, 1000)
    assert max(abs(exact[x] - limit[x]) for x in CLEAN_STATES) < 1e-3
    for sampler in (FirstHitting(), RandomOrder(steps=3), RandomOrder(steps=50)):
        assert chi_square_p_value(sample_counts(sampler, table, 6400, 64), exact) > REJECT


@pytest.mark.parametrize(
    "sampler",
    [
        FirstHitting(),
        RandomOrder(steps=3),
        Confidence(steps=3, measure=Entropy()),
        Confidence(steps=3, measure=Margin()),
        EntropyBounded(entropy_bound=0),
    ],
    ids=lambda s: type(s).__name__,
)
def test_one_at_a_time_in_any_order_reproduces_an_oracle(sampler: Sampler) -> None:
    """With the true conditionals of a joint distribution, an order chosen before the token is exact."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    assert chi_square_p_value(sample_counts(sampler, table, 6400, 64), joint) > REJECT


@pytest.mark.parametrize(
    "sampler",
    [
        ReMDM(steps=4, remasking=Cap(eta=0.3)),
        ReMDM(steps=4, remasking=Rescale(eta=0.5)),
        ReMDM(steps=8, remasking=Cap(eta=0.4), loop=Loop(t_on=0.6, t_off=0.2, alpha_on=0.7)),
    ],
    ids=["cap", "rescale", "loop"],
)
@pytest.mark.parametrize("canvas", [ALL_MASKED, PARTLY], ids=["blank", "infill"])
def test_remasking_is_the_enumerated_chain(sampler: ReMDM, canvas: State) -> None:
    """ReMDM's posterior, with the network told the time of the level it stands at."""
    table = random_table(MDLM(schedule=LINEAR))
    visible = alpha_grid(LINEAR, sampler.steps).flip(0)
    if sampler.loop is not None:
        visible = sampler.loop.alphas(sampler.steps)
    p = point_mass(canvas)
    for alpha_t, alpha_s in zip(visible.tolist(), visible.tolist()[1:], strict=False):
        largest = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        sigma = 0.0
        if sampler.loop is None or alpha_s == alpha_t:
            eta = sampler.remasking.eta
            sigma = min(eta, largest) if isinstance(sampler.remasking, Cap) else eta * largest
        appear = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        p = reverse_step(table, p, 1 - alpha_t, appear, sigma, fixed=canvas)
    assert chi_square_p_value(sample_counts(sampler, table, 6400, 64, canvas), text_distribution(p)) > REJECT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", [LINEAR, Cosine(), Geometric()], ids=lambda s: type(s).__name__)
def test_the_chains_at_length(schedule: Schedule, seed: int) -> None:
    """The same proofs with a quarter of a million texts each: deviations of a part in a thousand show."""
    table = random_table(MDLM(schedule=schedule), seed=seed)
    for sampler, exact in (
        (Ancestral(3), ancestral_distribution(table, schedule, 3)),
        (Ancestral(50), ancestral_distribution(table, schedule, 50)),
        (ReMDM(1), ancestral_distribution(table, schedule, 1)),
    ):
        assert chi_square_p_value(sample_counts(sampler, table, 250_000, 5_000), exact) > REJECT
    timeless = random_table(MDLM(schedule=schedule), seed=seed, drift=0)
    assert (
        chi_square_p_value(sample_counts(FirstHitting(), timeless, 250_000, 5_000), random_order_distribution(timeless))
        > REJECT
    )
