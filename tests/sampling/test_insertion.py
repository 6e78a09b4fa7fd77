"""The sampler that inserts tokens: its law by enumeration, holes between given tokens, and what it refuses."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

import tiny_models
from text_oracle import LONGEST, MASK, Prediction, Text, TextDenoiser, law, random_table
from unmask.guidance import AllowedTokens
from unmask.objectives import MDLM, FlexMDM
from unmask.sampling import Insertion
from unmask.sampling.canvas import Canvas


def poisson(mean: float, count: int, most: int) -> float:
    """P(count), where all that is more than `most` counts as it."""
    if count < most:
        return math.exp(-mean) * mean**count / math.factorial(count)
    return 1 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(most))


def after_step(z: Text, rows: np.ndarray, r: float, rate: float) -> dict[Text, float]:
    """The distribution of texts after a step from z: every mask and every gap by itself."""
    free = LONGEST - len(z)
    means = [rate * math.exp(row[2]) for row in rows]
    choices = [
        [(v, 1.0)] if v != MASK else [(MASK, 1 - r), (0, r * math.exp(row[0])), (1, r * math.exp(row[1]))]
        for v, row in zip(z, rows, strict=False)
    ]
    result: Counter[Text] = Counter()
    for counts in itertools.product(range(free + 1), repeat=len(z) + 1):
        of_counts = math.prod(poisson(mean, count, free) for mean, count in zip(means, counts, strict=True))
        for tokens in itertools.product(*choices):
            text, left = list[int](), free
            for place, count in enumerate(counts):
                fitting = min(count, left)
                left -= fitting
                text += [MASK] * fitting + [v for v, _ in tokens[place : place + 1]]
            result[tuple(text)] += of_counts * math.prod(probability for _, probability in tokens)
    return dict(result)


def chain(predict: Prediction, steps: int) -> dict[Text, float]:
    """The exact output distribution of T steps."""
    current: dict[Text, float] = {(): 1.0}
    for number in range(steps + 1):
        p = max(1, steps - number) / steps
        r, rate = (1 / (p * steps), 1 / steps) if number < steps else (1.0, 0.0)
        following: Counter[Text] = Counter()
        for z, probability in current.items():
            for text, share in after_step(z, predict(z, p), r, rate).items():
                following[text] += probability * share
        current = dict(following)
    return {z: p for z, p in current.items() if p > 0 and MASK not in z}


def sampled(denoiser: TextDenoiser, canvas: list[int], count: int, steps: int) -> Counter[Text]:
    blank = Canvas(torch.tensor([canvas] * count), tuple(range(count)))
    *_, z = Insertion(steps).run(denoiser, blank)
    return Counter(tuple(v for v in row if v != MASK) for row in z.tolist())


@pytest.mark.parametrize("steps", [1, 3])
def test_its_law_is_that_of_its_steps(steps: int) -> None:
    predict, count = random_table(), 3000
    expected = chain(predict, steps)
    assert sum(expected.values()) == pytest.approx(1)
    seen = sampled(TextDenoiser(predict), [MASK] * LONGEST, count, steps)
    assert set(seen) <= set(expected)
    texts = sorted(expected)
    test = stats.chisquare([seen[x] for x in texts], [expected[x] * count for x in texts])
    assert test.pvalue > 1e-3


def test_with_more_steps_its_law_is_the_model_s() -> None:
    predict = random_table(1)
    true = law(predict)
    far, near = (
        sum(abs(made.get(x, 0) - p) for x, p in true.items()) / 2 for made in (chain(predict, 8), chain(predict, 64))
    )
    assert near < far / 4
    assert near < 0.02


def last(canvas: list[list[int]], seeds: tuple[int, ...], steps: int = 12) -> torch.Tensor:
    model = tiny_models.tiny_denoiser(FlexMDM(), time_conditioned=True, length=23)
    *_, z = Insertion(steps).run(model, Canvas(torch.tensor(canvas), seeds))
    return z


def test_given_tokens_stay_and_holes_are_filled_from_the_left() -> None:
    canvas = [[0, 4, 4, 4, 1, 2, 4, 4, 4, 4, 3], [4, 4, 4, 4, 4, 0, 1, 4, 4, 4, 4]]
    z = last(canvas, (1, 2))
    given = torch.tensor(canvas) != 4
    assert torch.equal(z[given], torch.tensor(canvas)[given])
    for hole in (z[0, 1:4], z[0, 6:10], z[1, :5], z[1, 7:]):
        empty = (hole == 4).tolist()
        assert empty == sorted(empty)
    assert (z[~given] != 4).any()


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    canvas = [[4] * 9, [0, 4, 4, 4, 4, 1, 4, 4, 2], [4, 4, 4, 4, 4, 4, 4, 4, 1]]
    together = last(canvas, (5, 6, 7))
    for row in range(3):
        assert torch.equal(last(canvas[row : row + 1], (5 + row,))[0], together[row])
    assert not torch.equal(last(canvas, (8, 9, 10)), together)


def test_a_text_has_at_most_the_tokens_that_the_model_reads() -> None:
    z = last([[0] * 20 + [4] * 30], (3,))
    assert 20 <= int((z != 4).sum()) <= 23
    with pytest.raises(ValueError, match="24 tokens are given, and a text of this model has at most 23"):
        last([[0] * 24 + [4]], (0,))


def test_banned_tokens_leave_the_rates_of_insertion_alone() -> None:
    model = tiny_models.tiny_denoiser(FlexMDM(), time_conditioned=True, length=23)
    z, t = torch.tensor([[0, 4, 1, 4]]), torch.full((1, 4), 0.5)
    everywhere = torch.ones_like(z, dtype=torch.bool)
    free = model(z, t, everywhere)
    banned = AllowedTokens.ban(model, [0, 1])(z, t, everywhere)
    torch.testing.assert_close(banned[:, 4], free[:, 4])
    assert (banned[:, :2] == -torch.inf).all()
    torch.testing.assert_close(banned[:, [2, 3, 5, 6]].exp().sum(-1), torch.ones(4, dtype=torch.float64))


def test_it_is_for_models_that_insert() -> None:
    canvas = Canvas(torch.tensor([[4, 4]]), (0,))
    with pytest.raises(ValueError, match="masked diffusion that inserts tokens"):
        next(Insertion().run(tiny_models.tiny_denoiser(MDLM()), canvas))
