"""Matrices of few bits: their errors, products, slices and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unmask.ops import fast_paths
from unmask.ops._quantized import Bits, group_size_for, quantize, quantized_nbytes
from unmask.ops.activations import GELU
from unmask.ops.linear import (
    Linear,
    QuantizedLinear,
    linear,
    linear_activation,
    linear_split,
    prepack,
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([8, 4]), st.sampled_from([2, 6, 16]), st.integers(0, 1000), st.floats(1e-6, 1e4))
def test_weights_are_the_nearest_of_their_grid(bits: Bits, group_size: int, seed: int, scale: float) -> None:
    """The error is at most half a step, and what the rounding of the scale cuts off at the ends."""
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(seed)) * scale
    matrix = quantize(weight, bits, group_size)
    groups = weight.view(5, -1, group_size)
    step = (groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15)[..., None]
    rounding = groups.abs().amax(-1, keepdim=True) * 2**-8  # of bfloat16 scales and offsets
    error = (matrix.to(torch.float32).view_as(groups) - groups).abs()
    assert bool((error <= 0.51 * step + 15 * step * 2**-8 + rounding).all())
    assert sum(each.nbytes for each in matrix.tensors) == quantized_nbytes(weight.shape, bits, group_size)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_on_the_grid_are_exact(bits: Bits) -> None:
    """Codes keep their places: no two weights of a group are exchanged."""
    least, most = (-127, 127) if bits == 8 else (0, 15)
    weight = torch.randint(least, most + 1, (7, 32), generator=torch.Generator().manual_seed(0)).float() / 4
    weight.view(7, 2, 16)[..., 0], weight.view(7, 2, 16)[..., 1] = least / 4, most / 4
    matrix = quantize(weight, bits, 16)
    assert torch.equal(matrix.to(torch.float32), weight)
    assert torch.equal(matrix[2:5].to(torch.float32), weight[2:5])
    assert not quantize(torch.zeros(2, 4), bits, 4).to(torch.float32).any()


def test_groups_divide_rows() -> None:
    assert [group_size_for(width, 64, 4) for width in (2048, 96, 10, 7)] == [64, 48, 10, None]
    assert group_size_for(7, 64, 8) == 7
    assert QuantizedLinear.from_linear(nn.Linear(7, 3), 4, 64) is None


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_slices_are_those_of_the_whole(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmask.ops._quantized._MAX_CACHED_WEIGHTS", 3 * 16)  # three rows, so that one is left
    torch.manual_seed(0)
    plain = Linear(16, 10)
    layer = plain if kind == "bfloat16" else QuantizedLinear.from_linear(plain, 8 if kind == "int8" else 4, 8)
    assert layer is not None
    layer.requires_grad_(False)
    if kind == "bfloat16":
        layer.weight.data = layer.weight.data.bfloat16()
    x = torch.randn(4, 3, 16).to(dtype)
    expected = x.float() @ layer.weight.to(torch.float32).t() + plain.bias.float()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for enabled in (True, False):
        for grad in (False, True):
            with fast_paths(enabled), torch.set_grad_enabled(grad):
                leaf = x.clone().requires_grad_(grad)
                y = layer(leaf)
                assert y.dtype == dtype
                torch.testing.assert_close(y.float(), expected, **tolerance)
                if grad:
                    (gradient,) = torch.autograd.grad(y.float().sum(), leaf)
                    torch.testing.assert_close(
                        gradient.float(), layer.weight.to(torch.float32).sum(0).expand_as(x), **tolerance
                    )
    with torch.no_grad():
        first, rest = linear_split(layer, x[0], x, 4)
        torch.testing.assert_close(first.float(), expected[0, :, :4], **tolerance)
        torch.testing.assert_close(rest.float(), expected[..., 4:], **tolerance)
        with_gelu = nn.functional.gelu(expected, approximate="tanh")
        torch.testing.assert_close(linear_activation(layer, GELU(), x).float(), with_gelu, **tolerance)


def test_autocast_decides_the_type_of_the_product() -> None:
    layer = QuantizedLinear.from_linear(Linear(16, 4), 8, 8)
    assert layer is not None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(torch.ones(2, 16)).dtype == torch.bfloat16


def test_a_narrow_weight_that_is_trained_has_a_gradient() -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    linear(torch.ones(2, 4), weight, None).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_float32_from_products_of_bfloat16(packed: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64).bfloat16(), nn.Parameter(torch.randn(40, 64).bfloat16()), torch.randn(40)
    exact = x.double() @ weight.double().t() + bias
    if packed:
        prepack(weight)
    for enabled in (True, False):
        with fast_paths(enabled), torch.no_grad():
            y = linear(x, weight, bias, float32_sums=True)
            assert y.dtype == torch.float32
            torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-4)
    with torch.no_grad():
        assert float((linear(x, weight, bias).double() - exact).abs().max()) > 1e-2  # what rounded sums would be
