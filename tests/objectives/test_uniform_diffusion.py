"""Uniform diffusion against enumeration over the 27 texts: its bound and its sampler."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from oracle import (
    CLEAN_STATES,
    LENGTH,
    LINEAR,
    NUM_CLEAN,
    VOCAB,
    State,
    TableDenoiser,
    chi_square_p_value,
    random_table,
    sample_counts,
)
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.schedule import Cosine, Schedule
from unmask.objectives import UniformDiffusion
from unmask.sampling import UniformAncestral
from unmask.types import Batch

X: State = (2, 0, 1)


def posterior(z: int, x: np.ndarray, a_s: float, a_t: float) -> np.ndarray:
    """q(z_s | z_t = z, x) [3] by Bayes' rule, for x a distribution over the clean tokens."""
    ratio = a_t / a_s
    likelihood = np.full(NUM_CLEAN, (1 - ratio) / NUM_CLEAN)
    likelihood[z] += ratio
    joint = likelihood * (a_s * x + (1 - a_s) / NUM_CLEAN)
    return joint / joint.sum()


def predictions(table: TableDenoiser, t: float) -> dict[State, np.ndarray]:
    """x_theta [L, 3] for each clean state."""
    z = torch.tensor(CLEAN_STATES)
    rows = torch.ones_like(z, dtype=torch.bool)
    log_x = table(z, torch.full((len(z), 1), t, dtype=torch.float64), rows)
    p = log_x.exp().view(len(CLEAN_STATES), LENGTH, VOCAB.size)[:, :, :NUM_CLEAN].numpy()
    return dict(zip(CLEAN_STATES, p, strict=True))


def chain(table: TableDenoiser, schedule: Schedule, steps: int) -> dict[State, float]:
    """The exact output distribution of T reverse steps from uniform noise."""
    level = alpha_grid(schedule, steps).tolist()
    p = dict.fromkeys(CLEAN_STATES, 1 / len(CLEAN_STATES))
    for i in range(steps, 0, -1):
        x = predictions(table, i / steps)
        after = np.zeros((NUM_CLEAN,) * LENGTH)
        for z in CLEAN_STATES:
            lines = [posterior(z[j], x[z][j], level[i - 1], level[i]) for j in range(LENGTH)]
            after += p[z] * np.einsum("a,b,c->abc", *lines)
        p = dict(zip(CLEAN_STATES, after.reshape(-1).tolist(), strict=True))
    return p


def bound(table: TableDenoiser, schedule: Schedule, steps: int, x: State) -> float:
    """Sum over the steps of E over z_t of KL(q(z_s | z_t, x) || q(z_s | z_t, x_theta))."""
    level, nats = alpha_grid(schedule, steps).tolist(), 0.0
    truth = np.eye(NUM_CLEAN)
    for i in range(1, steps + 1):
        guess = predictions(table, i / steps)
        for z in CLEAN_STATES:
            p = math.prod(level[i] * (z[j] == x[j]) + (1 - level[i]) / NUM_CLEAN for j in range(LENGTH))
            for j in range(LENGTH):
                q = posterior(z[j], truth[x[j]], level[i - 1], level[i])
                r = posterior(z[j], guess[z][j], level[i - 1], level[i])
                nats += p * sum(a * math.log(a / b) for a, b in zip(q, r, strict=True) if a > 0)
    return nats


@pytest.mark.parametrize("schedule", [LINEAR, Cosine(eps=0.1)], ids=repr)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_estimators_mean_is_the_exact_bound_and_bounds_the_sampler(schedule: Schedule, steps: int) -> None:
    objective = UniformDiffusion(schedule=schedule, steps=steps)
    table = random_table(objective)
    exact = bound(table, schedule, steps, X)
    batch = Batch(torch.tensor([X]).expand(4000, -1))
    means = [
        float(objective.token_nll(table, batch, torch.Generator().manual_seed(seed)).sum(1).mean()) for seed in range(8)
    ]
    error = np.std(means, ddof=1) / math.sqrt(8)
    assert abs(np.mean(means) - exact) < 4 * error + 1e-9
    drawn = chain(table, schedule, steps)
    slack = [bound(table, schedule, steps, x) + math.log(drawn[x]) for x in CLEAN_STATES]
    assert min(slack) > -1e-9


def continuous_bound(table: TableDenoiser, schedule: Schedule, x: State) -> float:
    """Duo's integral, by quadrature, and the KL of q(z_1 | x) to uniform noise."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    truth, nats = np.eye(NUM_CLEAN), 0.0
    for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        at = torch.tensor(t)
        alpha, slope = float(schedule.alpha(at)), float(schedule.dalpha(at))
        guess = predictions(table, t)
        for z in CLEAN_STATES:
            p = math.prod(alpha * (z[j] == x[j]) + (1 - alpha) / NUM_CLEAN for j in range(LENGTH))
            for j in range(LENGTH):
                a, b = (NUM_CLEAN * alpha * clean + 1 - alpha for clean in (truth[x[j]], guess[z][j]))
                r, q = a / a[z[j]], b / b[z[j]]
                nats += weight * p * -slope / (NUM_CLEAN * alpha) * float((q - r - r * np.log(q / r)).sum())
    last = float(schedule.alpha(torch.ones((), dtype=torch.float64)))
    left = [last * (v == 0) + (1 - last) / NUM_CLEAN for v in range(NUM_CLEAN)]
    return nats + LENGTH * sum(p * math.log(p * NUM_CLEAN) for p in left)


@pytest.mark.parametrize("schedule", [LINEAR, Cosine(eps=0.1)], ids=repr)
def test_the_bound_in_continuous_time_is_the_limit_of_many_steps(schedule: Schedule) -> None:
    objective = UniformDiffusion(schedule=schedule, steps=None)
    table = random_table(objective)
    exact = continuous_bound(table, schedule, X)
    assert bound(table, schedule, 300, X) == pytest.approx(exact, rel=0.02)
    batch = Batch(torch.tensor([X]).expand(4000, -1))
    means = [
        float(objective.token_nll(table, batch, torch.Generator().manual_seed(seed)).sum(1).mean()) for seed in range(8)
    ]
    assert abs(np.mean(means) - exact) < 4 * np.std(means, ddof=1) / math.sqrt(8)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_sampler_is_the_enumerated_chain(steps: int) -> None:
    table = random_table(UniformDiffusion(schedule=LINEAR, steps=steps))
    assert (
        chi_square_p_value(sample_counts(UniformAncestral(steps), table, 6400, 64), chain(table, LINEAR, steps)) > 1e-3
    )


def test_fixed_tokens_condition_the_sampler() -> None:
    """Every position sees the fixed ones; a chain over the open ones, by enumeration."""
    table, steps = random_table(UniformDiffusion(schedule=LINEAR, steps=3)), 3
    level = alpha_grid(LINEAR, steps).tolist()
    canvas: State = (VOCAB.mask_id, 1, VOCAB.mask_id)
    p = {z: 1 / 9 if z[1] == 1 else 0.0 for z in CLEAN_STATES}
    for i in range(steps, 0, -1):
        x, after = predictions(table, i / steps), dict.fromkeys(CLEAN_STATES, 0.0)
        for z, (a, c) in itertools.product(CLEAN_STATES, itertools.product(range(NUM_CLEAN), repeat=2)):
            first = posterior(z[0], x[z][0], level[i - 1], level[i])[a]
            third = posterior(z[2], x[z][2], level[i - 1], level[i])[c]
            after[a, 1, c] += p[z] * float(first * third)
        p = after
    assert chi_square_p_value(sample_counts(UniformAncestral(steps), table, 6400, 64, canvas), p) > 1e-3
