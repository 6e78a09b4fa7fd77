"""Confidence orders, against a plain loop written from their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny
from unmask import MDLM, Choice
from unmask.sampling import Confidence, EntropyBounded, RandomOrder, Threshold
from unmask.sampling.base import spread
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import AnyOrder, Entropy, Margin, Probability, entropy

MASK, LENGTH = 4, tiny.LENGTH
COLD = Choice(temperature=0)
MODEL = tiny.denoiser(MDLM())


def ask(z: Tensor) -> Tensor:
    """p [holes, V] of one row."""
    return MODEL(z[None], torch.full((1, 1), 0.5), (z == MASK)[None]).exp()


def sureness(order: AnyOrder, p: Tensor) -> Tensor:
    best = p.sort(descending=True).values
    if isinstance(order, Probability):
        return best[:, 0]
    if isinstance(order, Margin):
        return best[:, 0] - best[:, 1]
    return (p * p.clamp(min=1e-300).log()).sum(-1)


@pytest.mark.parametrize("order", [Probability(), Margin(), Entropy()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("steps", [1, 5, 12, 40])
def test_the_surest_positions_come_first(order: AnyOrder, steps: int) -> None:
    z = torch.full((LENGTH,), MASK)
    z[3] = 1
    canvas = Canvas(z[None].clone(), (0,))
    for written in Confidence(steps=steps, order=order, choice=COLD).run(MODEL, canvas):
        holes, p = (z == MASK).nonzero()[:, 0], ask(z)
        share = int((written[0] != z).sum())
        chosen = sureness(order, p).topk(share).indices
        z[holes[chosen]] = p[chosen].argmax(-1)
        assert torch.equal(z, written[0])
    assert MASK not in z


def test_shares_are_even_and_complete() -> None:
    shares = spread(torch.tensor([10, 3, 0]), 4)
    assert shares.tolist() == [[3, 3, 2, 2], [1, 1, 1, 0], [0, 0, 0, 0]]


def test_fixed_counts_in_random_order() -> None:
    """LLaDA's random remasking: a third of the holes at each of three steps, in an order that varies."""
    canvas = Canvas(torch.full((50, LENGTH), MASK), tuple(range(50)))
    first, second, third = RandomOrder(steps=3).run(MODEL, canvas)
    assert [(z == MASK).sum(1).unique().tolist() for z in (first, second, third)] == [[8], [4], [0]]
    often = (first != MASK).float().mean(0)
    assert (often > 0.1).all()
    assert (often < 0.6).all()


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_parallel_decoding_keeps_what_is_sure_enough_and_always_the_surest(threshold: float) -> None:
    z = torch.full((LENGTH,), MASK)
    z[3] = 1  # without a visible token all positions are equally sure
    for written in Threshold(threshold=threshold, choice=COLD).run(MODEL, Canvas(z[None].clone(), (0,))):
        holes, p = (z == MASK).nonzero()[:, 0], ask(z)
        best = p.max(-1).values
        chosen = (best >= threshold) | (best == best.max())
        z[holes[chosen]] = p[chosen].argmax(-1)
        assert torch.equal(z, written[0])


@pytest.mark.parametrize("bound", [0.2, 1.0, 3.0])
def test_entropy_bound_holds_at_every_step_and_is_used(bound: float) -> None:
    z = torch.full((LENGTH,), MASK)
    for written in EntropyBounded(bound=bound).run(MODEL, Canvas(z[None].clone(), (0,))):
        nats = entropy(ask(z).log())
        taken = (written[0] != z)[z == MASK]
        chosen, left = nats[taken], nats[~taken]
        assert chosen.sum() - chosen.max() <= bound + 1e-9
        if len(left):  # one more would have broken it
            assert left.min() >= chosen.max() - 1e-12
            assert chosen.sum() > bound - 1e-12
        z = written[0]


def test_noise_decides_between_equals() -> None:
    """On a blank canvas all positions are equally sure: rows must not all start at the same place."""
    canvas = Canvas(torch.full((60, LENGTH), MASK), tuple(range(60)))
    first = next(iter(Confidence(steps=LENGTH, order=Entropy()).run(MODEL, canvas)))
    places = (first != MASK).float().sum(0)
    assert (places > 0).sum() > LENGTH // 2
