"""FlexMDM against enumeration: two tokens, texts of at most three of them, all noisy texts, all times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unmask import Batch, Vocab
from unmask.diffusion.noise_level import continuous_level
from unmask.diffusion.process import Insertion
from unmask.diffusion.schedule import Cosine, LogLinear, Schedule
from unmask.objectives import FlexMDM, flexmdm
from unmask.objectives.base import Noise
from unmask.types import RowFn

MASK, LONGEST = 2, 3
VOCAB = Vocab(size=3, mask_id=MASK)
Text = tuple[int, ...]
STATES: list[Text] = [z for n in range(LONGEST + 1) for z in itertools.product(range(3), repeat=n)]
TEXTS: list[Text] = [z for z in STATES if MASK not in z]
Prediction = Callable[[Text, float], np.ndarray]
"""Rows [n + 1, 3] of log mu, and of l in the column of the mask, for a noisy text and p; the last is the end's."""


@dataclass
class TextDenoiser:
    """Predictions for every noisy text, whatever else is in its batch."""

    predict: Prediction
    objective: FlexMDM = FlexMDM()
    vocab: Vocab = VOCAB
    max_length: int | None = LONGEST
    shift_logits: bool = False
    normalized: bool = True
    time_independent: bool = False

    @property
    def process(self) -> Insertion:
        return self.objective.process

    def __call__(
        self, z: Tensor, t: Tensor, positions: Any, context: Any = None, *, row_fn: RowFn, **options: Any
    ) -> Tensor:
        valid = torch.ones_like(z, dtype=torch.bool) if context is None or context.valid is None else context.valid
        rows = np.zeros((*z.shape, 3))
        for b in range(len(z)):
            *text, end = z[b][valid[b]].tolist()
            assert end == MASK
            p = float(1 - self.process.alpha(t[b].max()))
            rows[b, : len(text) + 1] = self.predict(tuple(text), p)
        return row_fn(torch.from_numpy(rows)[tuple(positions)], slice(None))


def alignments(z: Text, x: Text) -> list[Text]:
    """The places in x of the tokens of z, all that agree."""
    return [
        places
        for places in itertools.combinations(range(len(x)), len(z))
        if all(v in (MASK, x[i]) for v, i in zip(z, places, strict=True))
    ]


def gap_sizes(places: Text, length: int) -> list[int]:
    return [b - a - 1 for a, b in itertools.pairwise((-1, *places, length))]


def random_joint(seed: int = 0) -> dict[Text, float]:
    return dict(zip(TEXTS, np.random.default_rng(seed).dirichlet(np.ones(len(TEXTS))).tolist(), strict=True))


def exact(joint: dict[Text, float]) -> Prediction:
    """The posterior means of a distribution over texts."""

    def predict(z: Text, p: float) -> np.ndarray:
        tokens, gaps = np.zeros((len(z) + 1, 2)), np.zeros(len(z) + 1)
        total = 0.0
        for x, probability in joint.items():
            for places in alignments(z, x):
                weight = probability * p ** (len(x) - len(z))
                total += weight
                gaps += weight * np.array(gap_sizes(places, len(x)))
                for row, place in enumerate(places):
                    tokens[row, x[place]] += weight
        with np.errstate(divide="ignore"):
            rates = np.log(gaps / total / p).clip(min=-60)
            return np.column_stack([np.log(tokens / total).clip(min=-60), rates])

    return predict


def random_table(seed: int = 0) -> Prediction:
    """Any predictions, which drift with p; no text has more than three tokens."""
    generator = np.random.default_rng(seed)
    table = {z: generator.normal(size=(2, len(z) + 1, 3)) for z in STATES}

    def predict(z: Text, p: float) -> np.ndarray:
        rows = table[z][0] + p * table[z][1]
        rows[:, :2] -= np.logaddexp(rows[:, 0], rows[:, 1])[:, None]
        if len(z) == LONGEST:
            rows[:, 2] = -60
        return rows

    return predict


def cells(x: Text, p: float) -> list[tuple[Text, float, list[float]]]:
    """The state of every token (0 missing, 1 a mask, 2 visible), their probability, and uniform numbers for them."""
    share = [p, -p * math.log(p), 1 - p + p * math.log(p)]
    middle = [p / 2, p + share[1] / 2, 1 - share[2] / 2]
    states = itertools.product(range(3), repeat=len(x))
    return [(each, math.prod(share[s] for s in each), [middle[s] for s in each]) for each in states]


def integrand(predict: Prediction, x: Text, p: float) -> float:
    """E over z of the KL of the jump rates at p, per unit of p, in the form that is not simplified."""
    nats = 0.0
    for states, probability, _ in cells(x, p):
        places = tuple(i for i, s in enumerate(states) if s > 0)
        z = tuple(x[i] if states[i] == 2 else MASK for i in places)
        rows = predict(z, p)
        cost = sum(-rows[row, x[i]] for row, i in enumerate(places) if states[i] == 1)
        for y, log_rate in zip(gap_sizes(places, len(x)), rows[:, 2], strict=True):
            cost += p * math.exp(log_rate) - y - y * (math.log(p) + log_rate)
        nats += probability * cost / p
    return nats


def bound(predict: Prediction, x: Text, nodes: int = 60) -> float:
    """The integral over p in (0, 1), as one over v with p = v^4, because it is logarithmic at 0."""
    v, weight = np.polynomial.legendre.leggauss(nodes)
    v, weight = (v + 1) / 2, weight / 2
    return sum(w * 4 * u**3 * integrand(predict, x, u**4) for u, w in zip(v.tolist(), weight.tolist(), strict=True))


def jump_rates(predict: Prediction, p: float) -> np.ndarray:
    """Rates [from, to] per unit of -log p."""
    rates = np.zeros((len(STATES), len(STATES)))
    number = {z: i for i, z in enumerate(STATES)}
    for z in STATES:
        rows = predict(z, p)
        for place in range(len(z) + 1):
            if len(z) < LONGEST:
                rates[number[z], number[(*z[:place], MASK, *z[place:])]] += p * math.exp(rows[place, 2])
            if place < len(z) and z[place] == MASK:
                for token in range(2):
                    after = (*z[:place], token, *z[place + 1 :])
                    rates[number[z], number[after]] += math.exp(rows[place, token])
    return rates - np.diag(rates.sum(1))


def law(predict: Prediction, end: float = 18.0, steps: int = 400) -> dict[Text, float]:
    """The distribution of texts that the jump process makes, from the empty text at p = 1 on."""
    probability, h = np.eye(len(STATES))[0], end / steps
    for step in range(steps):  # midpoint exponential: exact for rates that are linear in time
        middle = jump_rates(predict, math.exp(-(step + 0.5) * h))
        term, total = probability, probability
        for order in range(1, 12):
            term = term @ middle * h / order
            total = total + term
        probability = total
    return {z: p for z, p in zip(STATES, probability.tolist(), strict=True) if MASK not in z}


@pytest.mark.parametrize("x", TEXTS, ids=str)
def test_the_bound_is_an_equation_for_the_exact_posterior(x: Text) -> None:
    joint = random_joint()
    assert bound(exact(joint), x) == pytest.approx(-math.log(joint[x]), abs=1e-4)


def test_the_jump_process_of_the_exact_posterior_makes_its_distribution() -> None:
    joint = random_joint()
    made = law(exact(joint))
    assert made == pytest.approx(joint, abs=2e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_bound_is_above_the_model_s_own_law(seed: int) -> None:
    predict = random_table(seed)
    made = law(predict)
    assert sum(made.values()) == pytest.approx(1, abs=1e-6)
    excess = {x: bound(predict, x) + math.log(made[x]) for x in TEXTS}
    assert min(excess.values()) > -1e-4
    assert max(excess.values()) > 0.01


@pytest.mark.parametrize("schedule", [LogLinear(eps=0), LogLinear(), Cosine()], ids=repr)
def test_the_loss_is_the_enumerated_bound(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every p, the loss averaged over all cells has the value of the KL but for terms that average to zero."""
    predict, objective = random_table(), FlexMDM(schedule=schedule)
    denoiser = TextDenoiser(predict, objective)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    for x in ((0, 1, 1), (1,)):
        total = 0.0
        for v, weight in zip(((nodes + 1) / 2).tolist(), weights.tolist(), strict=True):
            u = torch.full((3 ** len(x), 1), v**2, dtype=torch.float64)
            states = cells(x, float(1 - continuous_level(schedule, u).alpha[0]))
            noise = Noise(u, torch.ones_like(u), torch.tensor([cell[2] for cell in states], dtype=torch.float64))
            monkeypatch.setattr(flexmdm, "sample_noise", lambda *_, noise=noise: noise)
            nats = objective.token_nll(denoiser, Batch(torch.tensor([x] * len(states))), torch.Generator()).sum(1)
            total += weight * v * sum(cell[1] * float(each) for cell, each in zip(states, nats, strict=True))
        assert total == pytest.approx(bound(predict, x), abs=2e-3)
