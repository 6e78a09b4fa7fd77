"""Linear layers by oneDNN are those of torch, for every shape, and are left to torch where they must be."""

from __future__ import annotations

import gc
import math
import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from unmask.backbones.layers import MLP
from unmask.hardware.flops import count_flops
from unmask.ops import linear as products
from unmask.ops.activations import GELU, SquaredReLU, SwiGLU
from unmask.ops.linear import Linear, linear, linear_activation, linear_split, prepack

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN"
)


@pytest.mark.parametrize("shape", [(0, 6), (1, 6), (5, 6), (2, 3, 6)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_linear_map(shape: tuple[int, ...], biased: bool, gelu: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(each, generator=random).to(dtype) for each in (shape, (11, 6)))
    bias = torch.randn(11, generator=random) if biased else None
    if bias is not None and dtype != torch.bfloat16:  # a network in bfloat16 keeps its biases
        bias = bias.to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected = F.gelu(expected, approximate="tanh") if gelu else expected
    with torch.inference_mode():
        if dtype == torch.bfloat16 and not products._use_onednn(x, weight):
            bias = None if bias is None else bias.to(dtype)
        got = linear(x, weight, bias, gelu=gelu)
    close = {"atol": 0.03, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got.double(), expected, **close)
    assert got.dtype == dtype


@settings(deadline=None, max_examples=50)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 9),
    outputs=st.integers(2, 9),
    size=st.integers(1, 8),
    biased=st.booleans(),
    grad=st.booleans(),
)
def test_a_layer_in_two_parts_is_the_whole_layer(
    rows: int, width: int, outputs: int, size: int, biased: bool, grad: bool
) -> None:
    layer, size = Linear(width, outputs, bias=biased), min(size, outputs - 1)
    first, rest = torch.randn(rows + 1, width), torch.randn(rows, width)
    with torch.set_grad_enabled(grad):
        parts = linear_split(layer, first, rest, size)
        whole = linear_split(torch.nn.Sequential(layer), first, rest, size)
    expected = [F.linear(x, layer.weight, layer.bias) for x in (first, rest)]
    for got in (parts, whole):
        torch.testing.assert_close(got, (expected[0][:, :size], expected[1][:, size:]))


@pytest.mark.parametrize("activation", [GELU(), SquaredReLU(), SwiGLU()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_layer_with_its_activation_is_one_after_the_other(
    activation: torch.nn.Module, grad: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer, x = Linear(6, 8).to(dtype), torch.randn(5, 6).to(dtype)
    close = {"atol": 0.02, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(linear_activation(layer, activation, x), activation(layer(x)), **close)


def test_a_layer_has_the_state_of_a_layer_of_torch() -> None:
    ours, theirs = Linear(6, 4), torch.nn.Linear(6, 4)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


def test_where_gradients_are_needed_torch_keeps_them() -> None:
    x, weight = torch.randn(3, 6, requires_grad=True), torch.nn.Parameter(torch.randn(4, 6))
    linear(x, weight, None, gelu=True).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None


@needs_onednn
def test_fused_only_for_plain_numbers_without_a_gradient() -> None:
    x, weight = torch.randn(3, 6), torch.randn(4, 6)
    with torch.no_grad():
        assert products._use_onednn(x, weight)
        assert not products._use_onednn(x, weight.bfloat16())
        assert not products._use_onednn(x.to("meta"), weight.to("meta"))
        assert not products._use_onednn(x, weight.as_subclass(Sharded))
    assert not products._use_onednn(x, weight)


class Sharded(torch.Tensor):
    """A tensor that is more than its numbers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layers_say_the_same_with_and_without_a_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = MLP(Linear(8, 32), GELU(), Linear(32, 8)).to(dtype)
    x = torch.randn(5, 8).to(dtype)
    with torch.no_grad():
        alone = net(x)
    close = {"atol": 0.01, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(alone, net(x).detach(), **close)


@pytest.mark.parametrize("packed", [False, True])
def test_flops_are_counted(packed: bool) -> None:
    x, weight = torch.randn(2, 3, 6), torch.randn(4, 6)
    if packed:
        prepack(weight)
    with torch.no_grad(), count_flops(True) as count:
        linear(x, weight, None)
    assert count.flops == 2 * math.prod(x.shape) * 4


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16, 700])
@pytest.mark.parametrize("outputs", [1, 31, 300])
def test_a_packed_matrix_gives_the_same(dtype: torch.dtype, rows: int, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48).to(dtype), torch.nn.Parameter(torch.randn(outputs, 48).to(dtype))
    bias = torch.randn(outputs).to(dtype)
    with torch.inference_mode():
        plain = linear(x, weight, bias, gelu=True)
    prepack(weight)
    with torch.inference_mode():
        assert weight in products._PACKED_WEIGHTS
        torch.testing.assert_close(linear(x, weight, bias, gelu=True), plain)


@needs_onednn
@pytest.mark.parametrize("change", ["in place", "elsewhere"])
def test_a_changed_weight_is_not_multiplied_as_it_was(change: str) -> None:
    x, weight = torch.randn(3, 6), torch.nn.Parameter(torch.randn(4, 6))
    prepack(weight)
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        else:
            weight.data = 2 * weight.data
        torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight))
    assert weight not in products._PACKED_WEIGHTS


@needs_onednn
def test_a_packed_copy_goes_with_its_weight() -> None:
    gc.collect()
    before = len(products._PACKED_WEIGHTS)
    weight = torch.nn.Parameter(torch.randn(4, 6))
    prepack(weight)
    assert len(products._PACKED_WEIGHTS) == before + 1
    del weight
    gc.collect()
    assert len(products._PACKED_WEIGHTS) == before


def test_what_cannot_be_packed_is_left_alone() -> None:
    gc.collect()
    before = len(products._PACKED_WEIGHTS)
    with torch.inference_mode():
        uncounted = torch.randn(4, 6)
    for weight in (uncounted, torch.randn(4, 6).double(), torch.randn(4, 6).as_subclass(Sharded)):
        prepack(weight)
        torch.testing.assert_close(linear(weight[:2], weight, None), F.linear(weight[:2], weight))
    prepack(torch.empty(4, 6, device="meta"))
    assert len(products._PACKED_WEIGHTS) == before


NARROW = """
import torch
from unmask.ops.linear import _onednn_supports, linear, prepack
x, weight = torch.ones(3, 6).bfloat16(), torch.ones(4, 6).bfloat16()
with torch.no_grad():
    prepack(weight)
    print(_onednn_supports(torch.float32), _onednn_supports(torch.bfloat16))
    linear(x.float(), weight.float(), None)
"""


@needs_onednn
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs cannot be told to be older")
def test_a_cpu_that_cannot_multiply_bfloat16_is_not_asked_to() -> None:
    old = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", NARROW], capture_output=True, text=True, check=True, env=old)
    assert done.stdout.split() == ["True", "False"]
