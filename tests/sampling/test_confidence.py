"""Confidence orders, against a plain loop written from their definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from unmask import MDLM, SamplingParams
from unmask.sampling import Confidence, EntropyBounded, Factor, RandomOrder, Threshold
from unmask.sampling._unmasking import ranks, tokens_per_step
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Entropy, Margin, Probability, _AnyConfidenceMeasure, _entropy

MASK, LENGTH = 4, tiny_models.LENGTH
COLD = SamplingParams(temperature=0)
MODEL = tiny_models.tiny_denoiser(MDLM())


def ask(z: Tensor) -> Tensor:
    """p [holes, V] of one row."""
    return MODEL(z[None], torch.full((1, 1), 0.5), (z == MASK)[None]).exp()


def sureness(order: _AnyConfidenceMeasure, p: Tensor) -> Tensor:
    best = p.sort(descending=True).values
    if isinstance(order, Probability):
        return best[:, 0]
    if isinstance(order, Margin):
        return best[:, 0] - best[:, 1]
    return (p * p.clamp(min=1e-300).log()).sum(-1)


@pytest.mark.parametrize("order", [Probability(), Margin(), Entropy()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("steps", [1, 5, 12, 40])
def test_the_surest_positions_come_first(order: _AnyConfidenceMeasure, steps: int) -> None:
    z = torch.full((LENGTH,), MASK)
    z[3] = 1
    canvas = Canvas(z[None].clone(), (0,))
    for written in Confidence(steps=steps, measure=order, params=COLD).run(MODEL, canvas):
        holes, p = (z == MASK).nonzero()[:, 0], ask(z)
        share = int((written[0] != z).sum())
        chosen = sureness(order, p).topk(share).indices
        z[holes[chosen]] = p[chosen].argmax(-1)
        assert torch.equal(z, written[0])
    assert MASK not in z


def test_shares_are_even_and_complete() -> None:
    shares = tokens_per_step(torch.tensor([[10], [3], [0]]), 4, torch.arange(4))
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
    for written in Threshold(threshold=threshold, params=COLD).run(MODEL, Canvas(z[None].clone(), (0,))):
        holes, p = (z == MASK).nonzero()[:, 0], ask(z)
        best = p.max(-1).values
        chosen = (best >= threshold) | (best == best.max())
        z[holes[chosen]] = p[chosen].argmax(-1)
        assert torch.equal(z, written[0])


@pytest.mark.parametrize("bound", [0.2, 1.0, 3.0])
def test_entropy_bound_holds_at_every_step_and_is_used(bound: float) -> None:
    z = torch.full((LENGTH,), MASK)
    for written in EntropyBounded(entropy_bound=bound).run(MODEL, Canvas(z[None].clone(), (0,))):
        nats = _entropy(ask(z).log())
        taken = (written[0] != z)[z == MASK]
        chosen, left = nats[taken], nats[~taken]
        assert chosen.sum() - chosen.max() <= bound + 1e-9
        if len(left):  # one more would have broken it
            assert left.min() >= chosen.max() - 1e-12
            assert chosen.sum() > bound - 1e-12
        z = written[0]


@pytest.mark.parametrize(("nats", "stable"), [(1.5, 1), (1.5, 2), (1.2, 1), (1e-9, 1)])
def test_what_does_not_change_and_is_sure_is_written_at_once(nats: float, stable: int) -> None:
    """All of it, once the same tokens were predicted `stable` times again with a mean entropy below the bound."""
    sampler = Confidence(LENGTH, params=COLD, stop_entropy=nats, stable_steps=stable)
    z, before, same, calls = torch.full((LENGTH,), MASK), torch.full((LENGTH,), -1), 0, 0
    z[3], stopped = 1, False
    for written in sampler.run(MODEL, Canvas(z[None].clone(), (0,))):
        holes, p = (z == MASK).nonzero()[:, 0], ask(z)
        best = p.argmax(-1)
        same = same + 1 if torch.equal(before[holes], best) else 0
        before[holes], calls = best, calls + 1
        stopped = same >= stable and float(_entropy(p.log()).mean()) < nats
        chosen = torch.arange(len(holes)) if stopped else p.max(-1).values.topk(1).indices
        z[holes[chosen]] = best[chosen]
        assert torch.equal(z, written[0])
    assert (calls < LENGTH - 1) == (nats > 1e-9)
    assert MASK not in z


def test_noise_decides_between_equals() -> None:
    """On a blank canvas all positions are equally sure: rows must not all start at the same place."""
    canvas = Canvas(torch.full((60, LENGTH), MASK), tuple(range(60)))
    first = next(iter(Confidence(steps=LENGTH, measure=Entropy()).run(MODEL, canvas)))
    places = (first != MASK).float().sum(0)
    assert (places > 0).sum() > LENGTH // 2


def test_the_factor_bounds_what_is_written_together() -> None:
    """The n surest are kept as long as the n-th has at least 1 - factor/(n + 1): 0.5, 0.667, 0.75, 0.8."""
    score = torch.tensor([[0.9, 0.7, 0.76, 0.5], [0.3, 0.2, 0.1, 0.05], [0.99, 0.99, 0.99, 0.79]])
    place = ranks(-score)
    kept = Factor(1.0).select(score, place, torch.tensor([4, 4, 4]), 0)
    assert kept.tolist() == [
        [True, False, True, False],
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert Factor(1.05).select(score, place, torch.tensor([4, 4, 4]), 0)[0].tolist() == [
        True,
        False,
        True,
        False,
    ]
    assert Factor(1.3).select(score, place, torch.tensor([4, 4, 4]), 0)[0].tolist() == [
        True,
        True,
        True,
        False,
    ]
    assert bool(Factor(9.0).select(score, place, torch.tensor([4, 4, 4]), 0).all())
    with pytest.raises(ValueError, match="0 or above; got -1"):
        Factor(-1.0)


@pytest.mark.parametrize(
    "sampler",
    [
        Confidence(12, delayed_tokens=(3,)),
        Confidence(4, delayed_tokens=(3,)),
        Threshold(0.2, delayed_tokens=(3,)),
        Factor(2.0, delayed_tokens=(3,)),
        EntropyBounded(3.0, delayed_tokens=(3,)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_what_is_to_come_late_comes_when_nothing_else_is_left(sampler: Any, temperature: float) -> None:
    """At every temperature: a step writes such a token only if nothing else was drawn anywhere in its row, or
    if it must write so many; without being late, it is written earlier."""
    late = replace(sampler, params=SamplingParams(temperature=temperature))
    canvas = Canvas(torch.full((64, LENGTH), MASK), tuple(range(64)))

    def mean_step(tried: Any) -> float:
        """When the token 3 is written, on average, as a share of the steps."""
        frames = [canvas.tokens, *tried.run(MODEL, canvas)]
        found = [
            (number / len(frames), int(((after == 3) & (before == MASK)).sum()))
            for number, (before, after) in enumerate(pairwise(frames))
        ]
        return sum(when * count for when, count in found) / max(1, sum(count for _, count in found))

    free = replace(late, delayed_tokens=())
    assert mean_step(late) > mean_step(free) or (temperature == 0 and mean_step(late) >= mean_step(free))
    if not isinstance(sampler, Confidence):
        for before, after in pairwise([canvas.tokens, *late.run(MODEL, canvas)]):
            new = (before == MASK) & (after != MASK)
            alone = new.sum(1) == 1
            assert bool(alone[((after == 3) & new).any(1)].all())
