"""SEDD on uniform noise against enumeration over the 27 texts: its bound and its sampler, with true and any ratios."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oracle import (
    CLEAN_STATES,
    LENGTH,
    NUM_CLEAN,
    VOCAB,
    State,
    TableDenoiser,
    chi_square_p_value,
    random_table,
    sample_counts,
)
from unmask.diffusion.schedule import Geometric, LogLinear, Schedule
from unmask.objectives.sedd import UniformSEDD
from unmask.sampling import RatioAncestral
from unmask.types import Batch, RowFn

X: State = (2, 0, 1)
GEOMETRIC = Geometric(0.05, 4.0)
"""It begins with a twentieth of the text replaced, and ends with a fiftieth of it left."""


def noisy(joint: dict[State, float], alpha: float) -> np.ndarray:
    """p_t(z) [3, 3, 3] of texts that are distributed as `joint`."""
    p = np.array([joint[state] for state in CLEAN_STATES]).reshape((NUM_CLEAN,) * LENGTH)
    kernel = alpha * np.eye(NUM_CLEAN) + (1 - alpha) / NUM_CLEAN
    return np.einsum("abc,ad,be,cf->def", p, kernel, kernel, kernel)


@dataclass
class TrueRatios(TableDenoiser):
    """p_t(z with v)/p_t(z) of a joint distribution; noise in the column of the present token, which nobody may read."""

    joint: Any = None

    def __call__(
        self, z: Tensor, t: Tensor, positions: Any, *rest: Any, row_fn: RowFn | None = None, **options: Any
    ) -> Tensor:
        logits = torch.zeros(*z.shape, VOCAB.size, dtype=torch.float64)
        for b, state in enumerate(z.tolist()):
            p = noisy(self.joint, float(self.objective.process.alpha(t[b, 0].double())))
            for place in range(LENGTH):
                for v in range(NUM_CLEAN):
                    other = (*state[:place], v, *state[place + 1 :])
                    logits[b, place, v] = math.log(p[other] / p[tuple(state)]) if v != state[place] else 7.0
        rows = logits[positions]
        log_x = self.objective.log_probs(rows, rows.new_zeros(len(rows), 1), VOCAB)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


def one_step(ratios: np.ndarray, z: int, kept: float) -> np.ndarray:
    """SEDD's analytic step, as the paper has it: the score at s, times the probability of coming from there."""
    staggered = ratios / kept - (1 - kept) / (NUM_CLEAN * kept) * ratios.sum()
    transition = np.full(NUM_CLEAN, (1 - kept) / NUM_CLEAN) + kept * np.eye(NUM_CLEAN)[z]
    p = np.maximum(staggered, 0) * transition
    return p / p.sum()


def ratios_of(table: TableDenoiser, t: float) -> dict[State, np.ndarray]:
    """q [L, 3] for each clean state, 1 at its own tokens."""
    z = torch.tensor(CLEAN_STATES)
    rows = table(z, torch.full((len(z), 1), t, dtype=torch.float64), torch.ones_like(z, dtype=torch.bool))
    q = rows.view(len(z), LENGTH, VOCAB.size)[..., :NUM_CLEAN].exp().scatter(-1, z[..., None], 1.0)
    return dict(zip(CLEAN_STATES, q.numpy(), strict=True))


def chain(table: TableDenoiser, schedule: Schedule, steps: int) -> dict[State, float]:
    """The exact output distribution of T steps from uniform noise."""
    level = [1.0, *(float(schedule.alpha(torch.tensor(i / steps))) for i in range(1, steps + 1))]
    p = dict.fromkeys(CLEAN_STATES, 1 / len(CLEAN_STATES))
    for i in range(steps, 0, -1):
        q, after = ratios_of(table, i / steps), np.zeros((NUM_CLEAN,) * LENGTH)
        for z in CLEAN_STATES:
            lines = [one_step(q[z][j], z[j], level[i] / level[i - 1]) for j in range(LENGTH)]
            after += p[z] * np.einsum("a,b,c->abc", *lines)
        p = dict(zip(CLEAN_STATES, after.reshape(-1).tolist(), strict=True))
    return p


@pytest.mark.parametrize("steps", [1, 4])
def test_the_sampler_is_the_enumerated_chain(steps: int) -> None:
    table = random_table(UniformSEDD(schedule=GEOMETRIC))
    exact = chain(table, GEOMETRIC, steps)
    assert chi_square_p_value(sample_counts(RatioAncestral(steps), table, 6400, 64), exact) > 1e-3


def test_true_ratios_give_the_true_law() -> None:
    """As many steps as are needed, up to the text that the schedule leaves at t = 1 and that noise does not have."""
    weights = np.random.default_rng(0).dirichlet(np.ones(len(CLEAN_STATES)))
    joint = dict(zip(CLEAN_STATES, weights.tolist(), strict=True))
    schedule = Geometric(1e-4, 20.0)
    table = random_table(UniformSEDD(schedule=schedule))
    true = TrueRatios(table.logits, table.drift, table.objective, joint=joint)
    distances = [
        sum(abs(p - joint[state]) for state, p in chain(true, schedule, steps).items()) for steps in (8, 32, 128)
    ]
    assert distances[0] > 2 * distances[1] > 4 * distances[2]
    assert distances[2] < 0.05


def nats(q: np.ndarray, z: int, x: int, alpha: float) -> float:
    """The integrand of a position, by the definition of score entropy."""
    b = alpha * np.eye(NUM_CLEAN)[x] + (1 - alpha) / NUM_CLEAN
    r = b / b[z]
    return float((q - r - r * np.log(q / r)).sum()) / NUM_CLEAN


def bounds(table: TableDenoiser, schedule: Schedule, texts: list[State]) -> list[float]:
    """The integral over -d log alpha from alpha = 1 on for each text; t is 0 until the schedule begins."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    points = [((node + 1) / 2, weight / 2) for node, weight in zip(nodes, weights, strict=True)]
    first = float(schedule.alpha(torch.zeros((), dtype=torch.float64)))
    levels = []
    for s, weight in points:
        t = torch.tensor(s, dtype=torch.float64)
        alpha = float(schedule.alpha(t))
        levels.append((s, alpha, weight * -float(schedule.dalpha(t)) / alpha))
        if first < 1:  # points close to 1, where the integrand is not smooth
            levels.append((0.0, first ** (s**3), weight * 3 * s**2 * -math.log(first)))
    total = np.zeros(len(texts))
    for t, alpha, weight in levels:
        q = ratios_of(table, t)
        for z in CLEAN_STATES:
            table_of = [[nats(q[z][j], z[j], v, alpha) for v in range(NUM_CLEAN)] for j in range(LENGTH)]
            for index, x in enumerate(texts):
                p = math.prod(alpha * (z[j] == x[j]) + (1 - alpha) / NUM_CLEAN for j in range(LENGTH))
                total[index] += weight * p * sum(table_of[j][x[j]] for j in range(LENGTH))
    last = float(schedule.alpha(torch.ones((), dtype=torch.float64)))
    left = [last * (v == 0) + (1 - last) / NUM_CLEAN for v in range(NUM_CLEAN)]
    return (total + LENGTH * sum(p * math.log(p * NUM_CLEAN) for p in left)).tolist()


@pytest.mark.parametrize("schedule", [GEOMETRIC, LogLinear(eps=0.05)], ids=repr)
def test_the_estimators_mean_is_the_bound(schedule: Schedule) -> None:
    objective = UniformSEDD(schedule=schedule)
    table = random_table(objective)
    (exact,) = bounds(table, schedule, [X])
    batch = Batch(torch.tensor([X]).expand(4000, -1))
    means = [
        float(objective.token_nll(table, batch, torch.Generator().manual_seed(seed)).sum(1).mean()) for seed in range(8)
    ]
    assert abs(np.mean(means) - exact) < 4 * np.std(means, ddof=1) / math.sqrt(8)


def test_the_bound_is_the_entropy_where_ratios_are_true() -> None:
    """Averaged over texts, and up to what score entropy loses by asking for one position at a time: nothing."""
    weights = np.random.default_rng(1).dirichlet(np.ones(len(CLEAN_STATES)))
    joint = dict(zip(CLEAN_STATES, weights.tolist(), strict=True))
    schedule = Geometric(1e-4, 8.0)
    table = random_table(UniformSEDD(schedule=schedule))
    true = TrueRatios(table.logits, table.drift, table.objective, joint=joint)
    entropy = -sum(p * math.log(p) for p in joint.values())
    found = float(np.dot(list(joint.values()), bounds(true, schedule, list(joint))))
    assert found == pytest.approx(entropy, abs=0.01)


def test_noise_of_which_nothing_is_left_is_a_beginning_too() -> None:
    """There all true ratios are 1, and so they are here: the first step is as good as none."""
    table = random_table(UniformSEDD(schedule=LogLinear(eps=0.0)))
    table.logits, table.drift = torch.zeros_like(table.logits), torch.zeros_like(table.drift)
    counts = sample_counts(RatioAncestral(1), table, 6400, 64)
    assert chi_square_p_value(counts, dict.fromkeys(CLEAN_STATES, 1 / len(CLEAN_STATES))) > 1e-3


def test_the_own_column_is_never_read() -> None:
    """The published code writes a zero over it."""
    table = random_table(UniformSEDD(schedule=GEOMETRIC))
    other = random_table(UniformSEDD(schedule=GEOMETRIC))
    for number, state in enumerate(itertools.product(range(NUM_CLEAN + 1), repeat=LENGTH)):
        for place, token in enumerate(state):
            other.logits[number, place, token] += 3.0
    batch = Batch(torch.tensor([X]).expand(64, -1))
    losses = [each.objective.token_nll(each, batch, torch.Generator().manual_seed(0)) for each in (table, other)]
    assert torch.equal(*losses)
    assert sample_counts(RatioAncestral(3), table, 64, 64) == sample_counts(RatioAncestral(3), other, 64, 64)
