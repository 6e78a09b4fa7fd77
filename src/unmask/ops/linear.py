"""What linear layers are made of: their numbers' precision, and products where no gradient is needed.

There, on CPUs, oneDNN adds the bias and the activation as it goes. With many outputs and few rows it is also
half again as fast as MKL, which F.linear asks in float32; and it need not put a matrix in an order of its own
for every product, if there is a `pack`ed copy: nearly half of a head's time with few rows, a twentieth of a
layer's in bfloat16, a tenth to a third in float32.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

_PREPACK_ROWS = 512
"""With which products by packed matrices are fastest; the order is nearly the same for others."""


class _PackedWeight(NamedTuple):
    """A copy of a weight as it was in this place and version."""

    data_ptr: int
    version: int
    matrix: Tensor


_PACKED_WEIGHTS: MutableMapping[Tensor, _PackedWeight] = WeakTensorKeyDictionary()


def prepack(weight: Tensor) -> None:
    """Keep a copy in oneDNN's order for products without a gradient, until the weight changes or goes.

    A change through `weight.data` in the same memory is not seen: call this again after it.
    """
    with torch.no_grad():
        one = torch.empty(1, dtype=weight.dtype, device=weight.device)
        if _use_onednn(one, weight) and not weight.is_inference():  # whose changes are not counted
            matrix = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PREPACK_ROWS)
            _PACKED_WEIGHTS[weight] = _PackedWeight(weight.data_ptr(), weight._version, matrix)


def _get_packed(weight: Tensor) -> Tensor:
    found = _PACKED_WEIGHTS.get(weight) if _PACKED_WEIGHTS else None
    if found is None:
        return weight
    if (found.data_ptr, found.version) != (weight.data_ptr(), weight._version):
        del _PACKED_WEIGHTS[weight]
        return weight
    return found.matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """x weight^T + bias, and GELU (the one with tanh) of that if asked for; without a gradient."""
    if _use_onednn(x, weight):
        bias = None if bias is None else bias.to(weight.dtype)
        activation = ("gelu", "tanh") if gelu else ("none", "")
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, _get_packed(weight), bias, activation[0], [], activation[1])
        return out
    out = F.linear(x, weight, bias)
    return F.gelu(out, approximate="tanh") if gelu else out


def _use_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, torch.nn.Parameter)  # and not sharded, quantised or without data
        and type(x) is Tensor
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and _onednn_supports(x.dtype)
    )


@cache
def _onednn_supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and multiplies such numbers: in bfloat16 not on every CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    one = torch.ones(1, 1, dtype=dtype)
    try:
        torch.ops.mkldnn._linear_pointwise(one, one, None, "gelu", [], "tanh")
    except RuntimeError:
        return False
    return True


def cast_like_autocast(x: Tensor) -> Tensor:
    """As autocast would make it for a linear layer, which would then keep what it made."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
