"""A world small enough to enumerate: three tokens and the mask, three positions, a table for a network.

Everything a sampler or a bound does with the table can be computed exactly here, as sums over all
4^3 = 64 noisy states, independently of the library's own loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.process import Masking, Process
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.objectives.base import Objective
from unmask.sampling.base import Sampler
from unmask.sampling.canvas import Canvas
from unmask.types import RowFn, Vocab

NUM_CLEAN, LENGTH, MASK = 3, 3, 3
VOCAB = Vocab(size=4, mask_id=MASK)
State = tuple[int, ...]
STATES: list[State] = list(itertools.product(range(NUM_CLEAN + 1), repeat=LENGTH))
CLEAN_STATES: list[State] = [state for state in STATES if MASK not in state]
ALL_MASKED: State = (MASK,) * LENGTH


@dataclass
class TableDenoiser:
    """Logits for every state, position and token, read through an objective; they drift with time."""

    logits: Tensor  # [64, L, V]
    drift: Tensor  # [64, L, V]
    objective: Objective
    vocab: Vocab = VOCAB
    max_length: int | None = LENGTH
    shift_logits: bool = False
    objective_parameters: nn.Module | None = None

    @property
    def process(self) -> Process:
        return self.objective.process_with(self.objective_parameters)

    @property
    def normalized(self) -> bool:
        return self.objective.normalized

    @property
    def time_independent(self) -> bool:
        return bool((self.drift == 0).all()) and not self.objective.depends_on_alpha

    def __call__(
        self, z: Tensor, t: Tensor, positions: Any, *rest: Any, row_fn: RowFn | None = None, **options: Any
    ) -> Tensor:
        assert t.shape == (len(z), 1)
        number = (z * torch.tensor([16, 4, 1])).sum(1)
        logits = self.logits[number] + t[:, :, None] * self.drift[number]
        alpha = torch.zeros_like(t)
        if isinstance(self.process, Masking):
            alpha = self.process.schedule.alpha(t)
        masked_alpha = torch.where(z == MASK, alpha.expand(z.shape), 0)
        log_x = self.objective.log_probs(logits[positions], masked_alpha[positions][:, None], self.vocab)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


def random_table(objective: Objective, seed: int = 0, drift: float = 1.0) -> TableDenoiser:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(STATES), LENGTH, VOCAB.size)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    return TableDenoiser(logits, drift * torch.randn(shape, generator=generator, dtype=torch.float64), objective)


def joint_table(objective: Objective, seed: int = 0) -> tuple[TableDenoiser, dict[State, float]]:
    """A table of the true conditionals of a random joint distribution over all texts."""
    p = np.random.default_rng(seed).dirichlet(np.ones(len(CLEAN_STATES)))
    joint = dict(zip(CLEAN_STATES, p.tolist(), strict=True))
    logits = torch.full((len(STATES), LENGTH, VOCAB.size), -30.0, dtype=torch.float64)
    for number, state in enumerate(STATES):
        agree = [x for x in CLEAN_STATES if all(z in (MASK, v) for z, v in zip(state, x, strict=True))]
        for place, token in itertools.product(range(LENGTH), range(NUM_CLEAN)):
            mass = sum(joint[x] for x in agree if x[place] == token)
            logits[number, place, token] = math.log(max(mass, 1e-300))
    return TableDenoiser(logits, torch.zeros_like(logits), objective), joint


def probabilities(table: DenoiserLike, t: float) -> np.ndarray:
    """exp(log_x) [64, L, V] of every state, at every position."""
    z = torch.tensor(STATES)
    time = torch.full((len(z), 1), t, dtype=torch.float64)
    log_x = table(z, time, torch.ones_like(z, dtype=torch.bool))
    return log_x.exp().double().view(len(STATES), LENGTH, VOCAB.size).numpy()


def point_mass(canvas: State) -> np.ndarray:
    """All mass [64] on one state."""
    return np.array([float(state == canvas) for state in STATES])


def reverse_step(
    table: DenoiserLike,
    before: np.ndarray,
    t: float,
    unmask_prob: float | np.ndarray,
    remask_prob: float = 0.0,
    fixed: State = ALL_MASKED,
) -> np.ndarray:
    """The distribution [64] after a step: masked -> v with reveal * x_v (or reveal_v * x_v), visible -> masked with
    hide."""
    x = unmask_prob * probabilities(table, t)[:, :, :NUM_CLEAN]
    total = x.sum(-1, keepdims=True)
    x = x / (total if np.all(unmask_prob == 1) else np.maximum(total, 1))
    kernel = np.zeros((len(STATES), LENGTH, VOCAB.size))  # where each position of each state goes
    for number, state in enumerate(STATES):
        for place, token in enumerate(state):
            if token == MASK:
                kernel[number, place, :NUM_CLEAN] = x[number, place]
            else:
                kernel[number, place, token] = 1 if fixed[place] != MASK else 1 - remask_prob
            kernel[number, place, MASK] = 1 - kernel[number, place, :NUM_CLEAN].sum()
    return np.einsum("s,sa,sb,sc->abc", before, kernel[:, 0], kernel[:, 1], kernel[:, 2]).reshape(-1)


def text_distribution(p: np.ndarray) -> dict[State, float]:
    """The distribution over texts; nothing may be left masked."""
    result = dict(zip(STATES, p.tolist(), strict=True))
    return {x: result[x] for x in CLEAN_STATES}


def ancestral_distribution(
    table: DenoiserLike, schedule: Schedule, steps: int, canvas: State = ALL_MASKED
) -> dict[State, float]:
    """The exact output distribution of T-step ancestral sampling."""
    level = alpha_grid(schedule, steps).tolist()
    p = point_mass(canvas)
    for i in range(steps, 0, -1):
        p = reverse_step(table, p, i / steps, (level[i - 1] - level[i]) / (1 - level[i]))
    return text_distribution(p)


def random_order_distribution(table: DenoiserLike, canvas: State = ALL_MASKED) -> dict[State, float]:
    """The exact output distribution of revealing one position after the other (a timeless table)."""
    holes = [place for place, token in enumerate(canvas) if token == MASK]
    result = dict.fromkeys(CLEAN_STATES, 0.0)
    orders = list(itertools.permutations(holes))
    prediction = dict(zip(STATES, probabilities(table, 0.5).tolist(), strict=True))
    for order, x in itertools.product(orders, CLEAN_STATES):
        if any(token not in (MASK, x[place]) for place, token in enumerate(canvas)):
            continue
        state, p = list(canvas), 1.0
        for place in order:
            p *= prediction[tuple(state)][place][x[place]]
            state[place] = x[place]
        result[x] += p / len(orders)
    return result


def maskings(x: State, alpha: float, prompt: int = 0) -> Iterator[tuple[State, float]]:
    """Every z_t of x with its probability; the first `prompt` tokens are never masked."""
    for hidden in itertools.product((False, True), repeat=LENGTH - prompt):
        z = tuple(MASK if h else v for h, v in zip([False] * prompt + [*hidden], x, strict=True))
        yield z, math.prod(1 - alpha if h else alpha for h in hidden)


def masked_nats(
    table: DenoiserLike, x: State, alpha: float, t: float, unmask_prob: float | None, prompt: int = 0
) -> float:
    """E over z_t of the summed KL of masked tokens, divided by the step's reveal probability.

    With a jump r: the KL between (r on x, 1 - r on the mask) and (r x_v, 1 - r S), from its definition.
    Without: the limit r -> 0, -log x + S - 1.
    """
    nats = 0.0
    prediction = probabilities(table, t)
    for z, p in maskings(x, alpha, prompt):
        for place, token in enumerate(z):
            if token != MASK or p == 0:
                continue
            line = prediction[STATES.index(z), place]
            at_x, total = float(line[x[place]]), float(line.sum())
            if unmask_prob is None:
                nats += p * (-math.log(at_x) + total - 1)
            else:
                stay = (
                    0.0
                    if unmask_prob == 1
                    else (1 - unmask_prob) * math.log((1 - unmask_prob) / (1 - unmask_prob * total))
                )
                nats += p * (-math.log(at_x) + stay / unmask_prob)
    return nats


def discrete_bound(table: DenoiserLike, schedule: Schedule, steps: int, x: State, prompt: int = 0) -> float:
    """The exact T-step bound in nats on -log p of x, given its first `prompt` tokens."""
    level = alpha_grid(schedule, steps).tolist()
    nats = 0.0
    for i in range(1, steps + 1):
        jump = (level[i - 1] - level[i]) / (1 - level[i])
        nats += jump * masked_nats(table, x, level[i], i / steps, jump, prompt)
    return nats


def continuous_bound(table: DenoiserLike, schedule: Schedule, x: State, nodes: int = 64, prompt: int = 0) -> float:
    """The exact continuous-time bound, given the first `prompt` tokens, as an integral over the level a of visible
    tokens: da/(1 - a) E[nats], with the clock at t(a)."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    ends = schedule.alpha(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    edges = sorted({0.0, ends[1], 0.5, ends[0], 1.0})
    nats = 0.0
    for low, high in itertools.pairwise(edges):
        level = (low + high) / 2 + (high - low) / 2 * points
        time = schedule.inverse(torch.tensor(level)).tolist()
        for a, t, w in zip(level.tolist(), time, weights.tolist(), strict=True):
            nats += (high - low) / 2 * w / (1 - a) * masked_nats(table, x, a, t, None, prompt)
    return nats


def sample_counts(
    sampler: Sampler, denoiser: DenoiserLike, n: int, batch: int, canvas: State = ALL_MASKED
) -> dict[State, int]:
    """How often each text comes out of n runs, `batch` at a time, each with its own seed."""
    result = dict.fromkeys(CLEAN_STATES, 0)
    for first in range(0, n, batch):
        tokens = torch.tensor([canvas] * batch)
        *_, z = sampler.run(denoiser, Canvas(tokens, tuple(range(first, first + batch))))
        for text in z.tolist():
            result[tuple(text)] += 1
    return result


def chi_square_p_value(seen: dict[State, int], expected: dict[State, float]) -> float:
    """The chi-square p-value of observed counts; impossible texts must not have been seen."""
    assert math.isclose(sum(expected.values()), 1, rel_tol=1e-9)
    n = sum(seen.values())
    common = [x for x in expected if expected[x] * n >= 5]
    rare = [x for x in expected if x not in common]
    assert all(seen[x] == 0 for x in rare if expected[x] < 1e-12)
    observed = [float(seen[x]) for x in common]
    wanted = [expected[x] * n for x in common]
    rest = sum(expected[x] for x in rare) * n
    if rest > 1e-9:
        observed.append(float(sum(seen[x] for x in rare)))
        wanted.append(rest)
    return float(stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue)


LINEAR = LogLinear(eps=0.0)
