"""The head on many rows, without the logits of all of them at a time: [N, V] is the largest tensor there is.

A part's gradient is taken while its logits are there. It is that of a sum over the rows, which is what a loss
is; if the rows turn out to count differently, the parts are computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from unmask.backbones.products import for_products, linear

AT_ONCE = 1 << 24
"""Logits that exist at a time: 64 MB of float32."""


WEIGHTS_AT_ONCE = 1 << 21
"""Of a gradient in 16 bits, which is added to one in 32 while it is in the cache."""


class Priced(NamedTuple):
    """Numbers `said` [n] of n lines, and how they grow with the logits: d said[i]/d logits[i] is
    scale[i] * slope[i], with `slope` [n, V] and `scale` [n]."""

    said: Tensor
    slope: Tensor
    scale: Tensor


class Answer(Protocol):
    """A number for each line of logits, given some of the lines and which of all these are.

    Logits belong to who answers, and may be overwritten.
    """

    def __call__(self, logits: Tensor, part: slice) -> Tensor:
        """The numbers [n] for logits [n, V]."""
        ...

    def priced(self, logits: Tensor, part: slice) -> Priced:
        """The same with its gradient."""
        ...


def in_parts(hidden: Tensor, weight: Tensor, bias: Tensor | None, answer: Answer) -> Tensor:
    """What `answer` says [N] of logits = hidden weight^T + bias [N, V], which is asked part by part.

    Under autocast the products are of its numbers, and their sums are kept in the weights' own.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        apply: Any = _InParts.apply
        said: Tensor = apply(hidden, weight, bias, answer)
        return said
    lines, matrix, offset = _for_products(hidden, weight, bias)
    parts = _parts(hidden, weight)
    return torch.cat([answer(linear(lines[part], matrix, offset), part) for part in parts])


def _for_products(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return for_products(hidden), for_products(weight), None if bias is None else for_products(bias)


def _parts(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Equal parts, so that the last one is not small; one even if there are no rows."""
    rows = len(hidden)
    size = max(1, -(-rows // max(1, -(-rows * len(weight) // AT_ONCE))))
    return (slice(first, min(first + size, rows)) for first in range(0, max(1, rows), size))


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, answer: Answer) -> Tensor:
        said, ctx.gradients = _with_gradients(hidden, weight, bias, answer, None)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.answer = answer
        return said

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (rates,) = outer
        gradients = ctx.gradients
        ctx.gradients = None  # a second pass must not find what the first one changed
        rate = float(rates[0]) if len(rates) else 1.0
        if gradients is None or not bool((rates == rate).all()):
            hidden, weight, bias = ctx.saved_tensors
            _, gradients = _with_gradients(hidden, weight, bias, ctx.answer, rates)
        elif rate != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(rate)
        return *gradients, None


@torch.no_grad()
def _with_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, answer: Answer, rates: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """What is said [N], and the gradients of its sum, in which line i counts `rates[i]` times."""
    said = []
    to_hidden = torch.empty_like(hidden)
    to_weight = torch.empty_like(weight) if weight.requires_grad else None
    to_bias = None if bias is None else torch.zeros_like(bias)
    lines, matrix, offset = _for_products(hidden, weight, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in _parts(hidden, weight):
            inputs = lines[part]
            said_here, slope, scale = answer.priced(linear(inputs, matrix, offset), part)
            said.append(said_here)
            scale = (scale if rates is None else scale * rates[part]).to(slope.dtype)[:, None]
            to_hidden[part] = scale * (slope @ matrix)
            if to_bias is not None:
                to_bias += (slope.t() @ scale)[:, 0]
            if to_weight is not None:
                _add_product(to_weight, slope.t(), scale * inputs, first=part.start == 0)
    return torch.cat(said), (to_hidden, to_weight, to_bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a b; the `first` product finds nothing there to add to."""
    if total.dtype != a.dtype:  # of products in 16 bits the sum is kept in 32
        size = max(1, WEIGHTS_AT_ONCE // total.shape[1])
        for here, some in zip(torch.split(total, size), torch.split(a, size), strict=True):
            here.copy_(some @ b) if first else here.add_(some @ b)
    elif first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)
