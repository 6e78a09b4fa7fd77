"""Muon: orthogonal updates, the same as torch's but for the precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unmask.training._muon import MuonOptimizer, _newton_schulz, _orthogonalize


@pytest.mark.parametrize("shape", [(40, 40), (20, 90), (90, 20)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = _orthogonalize(matrix)
    values = torch.linalg.svdvals(result)
    assert result.shape == shape
    assert 0.5 < values.min() <= values.max() < 1.3
    assert torch.allclose(torch.diag(torch.diag(u.T @ result @ v.T)), u.T @ result @ v.T, atol=1e-4)


def test_a_zero_gradient_moves_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    MuonOptimizer([weight], lr=0.1).step()
    assert torch.equal(weight, torch.ones(3, 4))


def test_steps_are_those_of_torch_within_its_bfloat16() -> None:
    torch.manual_seed(0)
    start = torch.randn(24, 16)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        MuonOptimizer([ours], lr=0.01, momentum=0.9, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(6):
        gradient = torch.randn(24, 16)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match="Muon is for matrices"):
        MuonOptimizer([nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (16, 24)])
def test_long_matrices_are_iterated_through_their_gram_matrix(shape: tuple[int, int], condition: float) -> None:
    """In float32 as in float64, and as well for matrices that are almost singular."""
    generator = torch.Generator().manual_seed(0)
    short = min(shape)
    left, _ = torch.linalg.qr(torch.randn(shape[0], short, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], short, generator=generator, dtype=torch.float64))
    sizes = torch.logspace(0, -math.log10(condition), short, dtype=torch.float64)
    matrix = left * sizes @ right.mT
    x = matrix.mT if shape[0] > shape[1] else matrix
    expected = _newton_schulz(x / x.norm(), 5)
    expected = expected.mT if shape[0] > shape[1] else expected
    torch.testing.assert_close(_orthogonalize(matrix), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(_orthogonalize(matrix.float()).double(), expected, rtol=0, atol=0.01)
