"""Linear layers: `F.linear` with gradients, oneDNN on CPUs without.

Without a gradient, oneDNN fuses the bias and the activation into the product. With many outputs and few rows
it is 1.5 times as fast as MKL, which `F.linear` calls in float32. It reorders the weight for every product
unless there is a `prepack`ed copy: that saves nearly half of the head's time with few rows, a twentieth of a
layer's time in bfloat16, and a tenth to a third in float32.

Weights that are stored in another type than that of the input (16 bits, or 8 or 4 by groups) are expanded a few rows at
a time, while they are in the cache: a network of 16 bits computes in float32 without a copy in float32.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from unmask.ops._quantized import DEFAULT_GROUP_SIZE as DEFAULT_GROUP_SIZE
from unmask.ops._quantized import Bits as Bits
from unmask.ops._quantized import (
    QuantizedMatrix,
    group_size_for,
    quantize,
    quantized_nbytes,
    row_slices,
    times_weight,
)
from unmask.ops._quantized import Weight as Weight
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

    @classmethod
    def like(cls, layer: nn.Linear | QuantizedLinear, weight: Tensor) -> Linear:
        """A layer with this weight, and the bias of another."""
        new = cls(layer.in_features, layer.out_features, bias=False, device="meta")
        new.weight = nn.Parameter(weight)
        new.register_parameter("bias", layer.bias)
        return new


class PackedLinear(Linear):
    """A `Linear` for products without a gradient whose only copy of its matrix is in oneDNN's order.

    Its state dict has the matrix in the usual order. All else works too, but expands the whole matrix first.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # that of nn.Linear would make a matrix
        self.out_features, self.in_features = layer.weight.shape
        self.weight = nn.Parameter(_reorder(layer.weight.detach()), requires_grad=False)
        self.bias = layer.bias

    @staticmethod
    def can_pack(layer: nn.Linear, dtype: torch.dtype) -> bool:
        """Whether products of this type with a layer's matrix are faster in oneDNN's order."""
        return type(layer) is Linear and layer.weight.dtype == dtype and _can_reorder(layer.weight)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parameters": {"weight": self.weight.to_dense(), "bias": self.bias}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = nn.Parameter(_reorder(state["_parameters"]["weight"]), requires_grad=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.to_dense()


class QuantizedLinear(nn.Module):
    """A linear layer whose matrix has 8 or 4 bits by groups; only its bias can be trained."""

    def __init__(self, matrix: QuantizedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        # Parameters, and not buffers, so that they are sharded as others are.
        self.codes, self.scale = (nn.Parameter(each, requires_grad=False) for each in (matrix.codes, matrix.scale))
        self.least = None if matrix.least is None else nn.Parameter(matrix.least, requires_grad=False)
        self.bias = bias

    @classmethod
    def from_linear(cls, layer: nn.Linear, bits: Bits, group_size: int) -> QuantizedLinear | None:
        """The same layer with rounded weights; None if its rows cannot be divided into groups."""
        size = group_size_for(layer.in_features, group_size, bits)
        return None if size is None else cls(quantize(layer.weight, bits, size), layer.bias)

    @property
    def weight(self) -> QuantizedMatrix:
        """The matrix."""
        return QuantizedMatrix(self.codes, self.scale, self.least)

    def forward(self, input: Tensor) -> Tensor:
        """x weight^T + bias for x [..., in_features]."""
        return linear(input, self.weight, self.bias)

    def to_linear(self, difference: Tensor | None = None) -> Linear:
        """A plain layer of bfloat16, the type in which such weights are computed; `difference` is added to its weights.

        Sums are in float32, and rounded once.
        """
        weight = self.weight.to(torch.float32)
        return Linear.like(self, (weight if difference is None else weight.add_(difference)).bfloat16())

    @staticmethod
    def nbytes_of(shape: torch.Size, bits: Bits, group_size: int) -> int | None:
        """Bytes of a matrix of this shape; None if it cannot be divided into groups."""
        return quantized_nbytes(shape, bits, group_size)

    def extra_repr(self) -> str:
        """For `repr`."""
        return f"{self.in_features}, {self.out_features}, bits={8 if self.least is None else 4}"


def _linear_reference(
    x: Float[Tensor, "*rows width"], weight: Weight, bias: Float[Tensor, " outputs"] | None, *, gelu: bool = False
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias in the type of x, followed by GELU (the tanh approximation) if asked for."""
    if not torch.is_autocast_enabled(x.device.type) or isinstance(weight, QuantizedMatrix):
        x = cast_like_autocast(x)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    y = F.linear(x, weight, bias)
    return gelu_reference(y) if gelu else y


def linear(
    x: Float[Tensor, "*rows width"],
    weight: Weight,
    bias: Float[Tensor, " outputs"] | None,
    *,
    gelu: bool = False,
    float32_sums: bool = False,
) -> Float[Tensor, "*rows outputs"]:
    """`_linear_reference`; by oneDNN if no gradient is needed, in slices if the weight is stored in another type.

    `float32_sums`: the result is float32 even if input and weight have 16 bits, and is not rounded to those.
    """
    if float32_sums and isinstance(weight, Tensor) and x.dtype == weight.dtype == torch.bfloat16:
        return _linear_float32(x, weight, bias)
    if isinstance(weight, Tensor) and _allows_onednn():
        packed = _get_packed(weight)
        if _use_onednn(x, packed):
            return _onednn_linear(x, packed, bias, gelu)
    if isinstance(weight, Tensor) and weight.is_mkldnn:
        weight = weight.to_dense()
    if _use_slices(x, weight):
        apply: Any = _SlicedLinear.apply
        y: Tensor = apply(cast_like_autocast(x), weight)
        y = y if bias is None else y + bias.to(y.dtype)
        return gelu_reference(y) if gelu else y
    return _linear_reference(x, weight, bias, gelu=gelu)


def _linear_float32(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, "outputs width"], bias: Float[Tensor, " outputs"] | None
) -> Float[Tensor, "*rows outputs"]:
    """x weight^T + bias with sums of float32, also where x and weight have 16 bits.

    oneDNN sums products of bfloat16 in float32, and rounds the sum s to y. A second product gives s - y, rounded to as
    many bits: together they are s to 2^-17 of it, without a copy of the weight in float32, which takes longer.
    """
    if not _allows_onednn() or not _use_onednn(x, packed := _get_packed(weight)):
        return linear(x.float(), weight, bias)
    rounded = _onednn_linear(x, packed, None)
    rest = torch.ops.mkldnn._linear_pointwise.binary(x, rounded, packed, None, "sub")
    y = rounded.float().add_(rest)
    return y if bias is None else y.add_(bias)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    bias = None if bias is None else bias.to(weight.dtype)
    activation, approximate = ("gelu", "tanh") if gelu else ("none", "")
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], approximate)
    return y


def _use_slices(x: Tensor, weight: Weight) -> bool:
    """Whether the weight must be expanded, and has no gradient of its own."""
    if torch.compiler.is_compiling() or not fast_paths_enabled():
        return False
    if isinstance(weight, QuantizedMatrix):
        return True
    trained = torch.is_grad_enabled() and weight.requires_grad
    return not trained and cast_like_autocast(x).dtype != weight.dtype and type(weight) in (Tensor, nn.Parameter)


class _SlicedLinear(torch.autograd.Function):
    """x weight^T for a weight without a gradient, of which a few rows at a time are expanded to the type of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            y = x.new_empty(*x.shape[:-1], weight.shape[0])
            for rows in row_slices(weight):
                part = weight[rows].to(x.dtype)
                y[..., rows] = _onednn_linear(x, part, None) if _use_onednn(x, part) else F.linear(x, part)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return times_weight(grad, ctx.weight), None


def linear_split(
    layer: nn.Module, x_first: Float[Tensor, "*rows width"], x_rest: Float[Tensor, "*other_rows width"], size: int
) -> tuple[Tensor, Tensor]:
    """layer(x_first)[..., :size] and layer(x_rest)[..., size:], without computing the other outputs of a `Linear`."""
    if not isinstance(layer, Linear | QuantizedLinear) or isinstance(layer, PackedLinear):
        # A layer with an adapter around it, or one whose rows cannot be told apart.
        return layer(x_first)[..., :size], layer(x_rest)[..., size:]
    weight, bias = layer.weight, layer.bias  # read once: a parametrization computes the weight
    rest = linear(x_rest, weight[size:], None if bias is None else bias[size:])
    return linear(x_first, weight[:size], None if bias is None else bias[:size]), rest


def linear_activation(layer: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(layer(x)): fused for GELU without a gradient, recomputed in the backward pass with one."""
    if not torch.is_grad_enabled() and isinstance(activation, GELU) and isinstance(layer, Linear | QuantizedLinear):
        return linear(x, layer.weight, layer.bias, gelu=True)
    return recomputed(activation, layer(x))


class _PackedWeight(NamedTuple):
    """A copy of a weight in oneDNN's order, and the address and version of the weight it was made of."""

    data_ptr: int
    version: int
    matrix: Tensor


_PACKED_WEIGHTS: MutableMapping[Tensor, _PackedWeight] = WeakTensorKeyDictionary()


def prepack(weight: Tensor, dtype: torch.dtype | None = None) -> None:
    """Keep a copy in oneDNN's order for products in `dtype` (None: its own) without a gradient.

    It is kept until the weight changes or is freed. A change through `weight.data` in the same memory is not noticed:
    call this again after it.
    """
    with torch.no_grad():
        expanded = weight.detach().to(dtype or weight.dtype)
        if _can_reorder(expanded) and not weight.is_inference():  # inference tensors have no version
            _PACKED_WEIGHTS[weight] = _PackedWeight(weight.data_ptr(), weight._version, _reorder(expanded))


def _can_reorder(weight: Tensor) -> bool:
    with torch.no_grad():
        return not weight.is_mkldnn and _use_onednn(torch.empty(1, dtype=weight.dtype, device=weight.device), weight)


def _reorder(weight: Tensor) -> Tensor:
    matrix: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PREPACK_ROWS)
    return matrix


def _get_packed(weight: Tensor) -> Tensor:
    packed = _PACKED_WEIGHTS.get(weight) if _PACKED_WEIGHTS else None
    if packed is None:
        return weight
    if (packed.data_ptr, packed.version) != (weight.data_ptr(), weight._version):
        del _PACKED_WEIGHTS[weight]
        return weight
    return packed.matrix


def _allows_onednn() -> bool:
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and fast_paths_enabled()


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        _allows_onednn()
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
