"""Activations are those of torch, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unmask.ops import fast_paths
from unmask.ops.activations import GELU, SquaredReLU, _squared_relu_reference, gelu_reference

REFERENCES = [(GELU(), gelu_reference), (SquaredReLU(), _squared_relu_reference)]


@pytest.mark.parametrize(("activation", "reference"), REFERENCES, ids=["gelu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5)])
def test_values_and_gradients_are_those_of_plain_torch(
    activation: nn.Module, reference: Callable[[Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    results = []
    for function in (activation, reference):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(results[0], results[1], **close)
    with fast_paths(False):
        assert torch.equal(activation(x), reference(x))


def test_gelu_in_bfloat16_is_off_by_an_eighth_of_a_rounding_of_one() -> None:
    """Beyond what the result is rounded by, for every bfloat16 number."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 1e30)]
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    rounding = 2.0**-8
    off = (GELU()(x).double() - expected).abs() - rounding * expected.abs()
    assert float(off.max()) < rounding / 7
    assert torch.equal(GELU()(x.clone().requires_grad_()).detach(), GELU()(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_is_the_same_in_training_and_afterwards(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 9999), torch.tensor([0.0, 1e-30, 1e15, -1e15])]).to(dtype)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    before = x.clone()
    torch.testing.assert_close(GELU()(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, before)
    trained = GELU()(x.requires_grad_())
    assert torch.equal(trained, GELU()(before))


@pytest.mark.parametrize("activation", [GELU(), SquaredReLU()], ids=["gelu", "relu2"])
def test_activations_have_their_gradients_and_those_of_these(activation: torch.nn.Module) -> None:
    x = torch.linspace(-4, 4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation, x)
    assert torch.autograd.gradgradcheck(activation, x)
    slope = torch.func.grad(lambda x: activation(x).sum())
    (expected,) = torch.autograd.grad(activation(x).sum(), x)
    torch.testing.assert_close(torch.func.vmap(slope)(x.detach()), expected)
