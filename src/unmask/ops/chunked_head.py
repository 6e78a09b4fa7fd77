"""The head on many rows, without the logits of all of them at a time: [N, V] is the largest tensor there is.

A part's gradient is taken while its logits are there. It is that of a sum over the rows, which is what a loss
is; if the rows turn out to count differently, the parts are computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unmask.ops.linear import cast_like_autocast, linear

_MAX_CHUNK_LOGITS = 1 << 24
"""Logits that exist at a time: 64 MB of float32."""


_MAX_CACHED_WEIGHTS = 1 << 21
"""Of a gradient in 16 bits, which is added to one in 32 while it is in the cache."""


class ValueAndGrad(NamedTuple):
    """Numbers `said` [n] of n lines, and how they grow with the logits: d said[i]/d logits[i] is
    scale[i] * slope[i], with `slope` [n, V] and `scale` [n]."""

    values: Tensor
    grad_logits: Tensor
    scale: Tensor


class _ChunkRowFn(Protocol):
    """A number for each line of logits, given some of the lines and which of all these are.

    Logits belong to who answers, and may be overwritten.
    """

    def __call__(self, logits: Tensor, indices: slice) -> Tensor:
        """The numbers [n] for logits [n, V]."""
        ...

    def value_and_grad(self, logits: Tensor, indices: slice) -> ValueAndGrad:
        """The same with its gradient."""
        ...


def chunked_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, row_fn: _ChunkRowFn) -> Tensor:
    """What `answer` says [N] of logits = hidden weight^T + bias [N, V], which is asked part by part.

    Under autocast the products are of its numbers, and their sums are kept in the weights' own.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        apply: Any = _ChunkedHead.apply
        said: Tensor = apply(hidden, weight, bias, row_fn)
        return said
    lines, matrix, offset = _cast_all(hidden, weight, bias)
    parts = _chunks(hidden, weight)
    return torch.cat([row_fn(linear(lines[part], matrix, offset), part) for part in parts])


def _cast_all(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return (
        cast_like_autocast(hidden),
        cast_like_autocast(weight),
        None if bias is None else cast_like_autocast(bias),
    )


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Equal parts, so that the last one is not small; one even if there are no rows."""
    rows = len(hidden)
    size = max(1, -(-rows // max(1, -(-rows * len(weight) // _MAX_CHUNK_LOGITS))))
    return (slice(first, min(first + size, rows)) for first in range(0, max(1, rows), size))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_fn: _ChunkRowFn) -> Tensor:
        said, ctx.gradients = _values_and_grads(hidden, weight, bias, row_fn, None)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.answer = row_fn
        return said

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (rates,) = outer
        gradients = ctx.gradients
        ctx.gradients = None  # a second pass must not find what the first one changed
        rate = float(rates[0]) if len(rates) else 1.0
        if gradients is None or not bool((rates == rate).all()):
            hidden, weight, bias = ctx.saved_tensors
            _, gradients = _values_and_grads(hidden, weight, bias, ctx.answer, rates)
        elif rate != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(rate)
        return *gradients, None


@torch.no_grad()
def _values_and_grads(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, row_fn: _ChunkRowFn, grad_output: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """What is said [N], and the gradients of its sum, in which line i counts `rates[i]` times."""
    said = []
    to_hidden = torch.empty_like(hidden)
    to_weight = torch.empty_like(weight) if weight.requires_grad else None
    to_bias = None if bias is None else torch.zeros_like(bias)
    lines, matrix, offset = _cast_all(hidden, weight, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in _chunks(hidden, weight):
            inputs = lines[part]
            said_here, slope, scale = row_fn.value_and_grad(linear(inputs, matrix, offset), part)
            said.append(said_here)
            scale = (scale if grad_output is None else scale * grad_output[part]).to(slope.dtype)[:, None]
            to_hidden[part] = scale * (slope @ matrix)
            if to_bias is not None:
                to_bias += (slope.t() @ scale)[:, 0]
            if to_weight is not None:
                _accumulate_product(to_weight, slope.t(), scale * inputs, overwrite=part.start == 0)
    return torch.cat(said), (to_hidden, to_weight, to_bias)


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """total += a b; the `first` product finds nothing there to add to."""
    if total.dtype != a.dtype:  # of products in 16 bits the sum is kept in 32
        size = max(1, _MAX_CACHED_WEIGHTS // total.shape[1])
        for here, some in zip(torch.split(total, size), torch.split(a, size), strict=True):
            here.copy_(some @ b) if overwrite else here.add_(some @ b)
    elif overwrite:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)
