"""Texts of all lengths in a world small enough to enumerate: two tokens and the mask, at most three of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unmask import Vocab
from unmask.diffusion.process import Insertion
from unmask.objectives import FlexMDM
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
