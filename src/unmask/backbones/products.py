"""What linear layers are made of: their numbers' precision, and products where no gradient is needed.

There, on CPUs, oneDNN adds the bias and the activation as it goes. With many outputs and few rows it is also
half again as fast as MKL, which F.linear asks in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """x weight^T + bias, and GELU (the one with tanh) of that if asked for; without a gradient."""
    if _fused(x, weight):
        bias = None if bias is None else bias.to(weight.dtype)
        activation = ("gelu", "tanh") if gelu else ("none", "")
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation[0], [], activation[1])
        return out
    out = F.linear(x, weight, bias)
    return F.gelu(out, approximate="tanh") if gelu else out


def _fused(x: Tensor, weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, torch.nn.Parameter)  # and not sharded, quantised or without data
        and type(x) is Tensor
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.device.type == "cpu"
        and x.numel() > 0
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def for_products(x: Tensor) -> Tensor:
    """As autocast would make it for a linear layer, which would then keep what it made."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
