"""Gradients are scaled and clipped in one pass; averaged weights are put in place for good."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unmask.training.optim import EMA, scale_and_clip_grads


def parameters(sizes: tuple[float, ...]) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(3)) for _ in sizes]
    for parameter, size in zip(made, sizes, strict=True):
        parameter.grad = torch.full((3,), size)
    return made


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_scaling_and_clipping_is_what_torch_does_in_two_passes(clip: float) -> None:
    ours, theirs = parameters((1.0, -4.0)), parameters((1.0, -4.0))
    norm = scale_and_clip_grads(ours, 0.25, clip)
    for parameter in theirs:
        assert parameter.grad is not None
        parameter.grad.mul_(0.25)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, clip)))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_what_is_not_finite_is_told_and_left() -> None:
    ours = parameters((1.0, math.nan))
    assert math.isnan(scale_and_clip_grads(ours, 0.25, 1.0))
    assert ours[0].grad is not None
    assert ours[0].grad.tolist() == [1.0] * 3


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    ours = [*parameters((2.0,)), nn.Parameter(torch.zeros(2))]
    assert scale_and_clip_grads(ours, 1.0, 1e3) == pytest.approx(12**0.5)


def test_the_average_stays() -> None:
    model = nn.Linear(2, 2)
    ema = EMA(model, 0.5)
    average = {name: weights.clone() for name, weights in ema.weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.copy_to(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, average[name])
