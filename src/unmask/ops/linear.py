"""Linear layers: `F.linear` with gradients, oneDNN on CPUs without.

Without a gradient, oneDNN fuses the bias and the activation into the product. With many outputs and few rows
it is 1.5 times as fast as MKL, which `F.linear` calls in float32. It reorders the weight for every product
unless there is a `prepack`ed copy: that saves nearly half of the head's time with few rows, a twentieth of a
layer's time in bfloat16, and a tenth to a third in float32.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from unmask.ops.activations import GELU, gelu_reference
from unmask.ops.recompute import recomputed
from unmask.ops.switch import fast_paths_enabled

_PREPACK_ROWS = 512
"""Rows of the input for which prepacked weights are ordered; the order is nearly the same for other numbers."""


class Linear(nn.Linear):
    """`nn.Linear` that takes the fast path where there is one; parameters and state dict are the same."""

    def forward(self, input: Tensor) -> Tensor:
        """x weight^T + bias for x [..., in_features]."""
        return linear(input, self.weight, self.bias)


def _linear_reference(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, "outputs width"],
    bias: Float[Tensor, " outputs"] | None,
    *,
    gelu: bool = False,
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias, followed by GELU (the tanh approximation) if asked for."""
    y = F.linear(x, weight, bias)
    return gelu_reference(y) if gelu else y


def linear(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, "outputs width"],
    bias: Float[Tensor, " outputs"] | None,
    *,
    gelu: bool = False,
) -> Float[Tensor, "*rows outputs"]:
    """`_linear_reference`, by oneDNN if no gradient is needed."""
    if not _use_onednn(x, weight):
        return _linear_reference(x, weight, bias, gelu=gelu)
    bias = None if bias is None else bias.to(weight.dtype)
    activation, approximate = ("gelu", "tanh") if gelu else ("none", "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, _get_packed(weight), bias, activation, [], approximate)
    return y


def linear_split(
    layer: nn.Module, x_first: Float[Tensor, "*rows width"], x_rest: Float[Tensor, "*other_rows width"], size: int
) -> tuple[Tensor, Tensor]:
    """layer(x_first)[..., :size] and layer(x_rest)[..., size:], without computing the other outputs of a `Linear`."""
    if not isinstance(layer, Linear):  # such as a layer with an adapter around it
        return layer(x_first)[..., :size], layer(x_rest)[..., size:]
    weight, bias = layer.weight, layer.bias  # read once: a parametrization computes the weight
    rest = linear(x_rest, weight[size:], None if bias is None else bias[size:])
    return linear(x_first, weight[:size], None if bias is None else bias[:size]), rest


def linear_activation(layer: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(layer(x)): fused for GELU without a gradient, recomputed in the backward pass with one."""
    if not torch.is_grad_enabled() and isinstance(activation, GELU) and isinstance(layer, Linear):
        return linear(x, layer.weight, layer.bias, gelu=True)
    return recomputed(activation, layer(x))


class _PackedWeight(NamedTuple):
    """A copy of a weight in oneDNN's order, and the address and version of the weight it was made of."""

    data_ptr: int
    version: int
    matrix: Tensor


_PACKED_WEIGHTS: MutableMapping[Tensor, _PackedWeight] = WeakTensorKeyDictionary()


def prepack(weight: Tensor) -> None:
    """Keep a copy in oneDNN's order for products without a gradient, until the weight changes or is freed.

    A change through `weight.data` in the same memory is not noticed: call this again after it.
    """
    with torch.no_grad():
        x = torch.empty(1, dtype=weight.dtype, device=weight.device)
        if _use_onednn(x, weight) and not weight.is_inference():  # inference tensors have no version
            matrix = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PREPACK_ROWS)
            _PACKED_WEIGHTS[weight] = _PackedWeight(weight.data_ptr(), weight._version, matrix)


def _get_packed(weight: Tensor) -> Tensor:
    packed = _PACKED_WEIGHTS.get(weight) if _PACKED_WEIGHTS else None
    if packed is None:
        return weight
    if (packed.data_ptr, packed.version) != (weight.data_ptr(), weight._version):
        del _PACKED_WEIGHTS[weight]
        return weight
    return packed.matrix


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and fast_paths_enabled()
        and type(weight) in (Tensor, nn.Parameter)  # not sharded, quantised or fake
        and type(x) is Tensor
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and x.numel() > 0
        and _onednn_supports(x.dtype)
    )


@cache
def _onednn_supports(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN and this CPU can multiply the type: not every CPU can do bfloat16."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    one = torch.ones(1, 1, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(one, one, None, "gelu", [], "tanh")
    except RuntimeError:
        return False
    return True


def cast_like_autocast(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x in the type that autocast would cast it to for a linear layer.

    Cast explicitly, the tensor can be recomputed in the backward pass; autocast would save its own copy.
    """
    device_type = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return x.to(torch.get_autocast_dtype(device_type))
    return x
