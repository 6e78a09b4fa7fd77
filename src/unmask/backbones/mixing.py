"""Attention in bfloat16 on CPUs: softmax(q k^T / sqrt(width)) v, a few heads at a time.

torch's own kernel multiplies small tiles, at a quarter of the speed that bfloat16 products reach here. Whole
heads are multiplied instead, as many as have their scores in the cache; the backward pass computes the scores
again. Where this does not apply (masks, other precisions and devices) it is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

AT_ONCE = 1 << 20
"""Scores that exist at a time: 2 MB, which a core's cache holds."""

LARGEST = 1 << 22
"""Scores of one head beyond which torch's kernel, which never has all of them, is the better one."""


def pays(q: Tensor, k: Tensor) -> bool:
    """Whether queries [B, heads, n, width] and keys [B, heads, K, width] are mixed faster here."""
    return (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[1] == k.shape[1]
        and q.shape[2] * k.shape[2] <= LARGEST
        and not torch.compiler.is_compiling()
    )


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, heads, n, width], everything seeing everything."""
    out: Tensor = _Mixed.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = _folded(q, k, v)
        out, scores = torch.empty_like(queries), _Scores(queries, keys)
        for some in scores.parts():
            torch.bmm(scores.of(some), values[some], out=out[some])
        return _unfolded(out, q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        """With p the softmax of scores s = c q k^T, and D the slope: dv = p^T D, dp = D v^T,
        ds = p (dp - sum(p dp)), dq = c ds k, dk = c ds^T q."""
        saved = ctx.saved_tensors
        q, k, v, slope = _folded(*saved, slope)
        to_q, to_k, to_v = (torch.empty_like(each) for each in (q, k, v))
        scores = _Scores(q, k)
        for some in scores.parts():
            p = scores.of(some)
            torch.bmm(p.transpose(1, 2), slope[some], out=to_v[some])
            dp = slope[some] @ v[some].transpose(1, 2)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            scores.times(ds, k[some], to_q[some])
            scores.times(ds.transpose(1, 2), q[some], to_k[some])
        return tuple(_unfolded(*pair) for pair in zip((to_q, to_k, to_v), saved, strict=True))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
        many = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(inputs, dims, strict=True)
        )
        q, k, v = (each.flatten(0, 1) for each in many)
        return torch.unflatten(mixed(q, k, v), 0, (info.batch_size, -1)), 0


def _folded(*each: Tensor) -> Iterator[Tensor]:
    """[heads B, n, width] of [B, heads, n, width], each head's lines one after another in memory."""
    return (x.transpose(0, 1).flatten(0, 1).contiguous() for x in each)


def _unfolded(x: Tensor, like: Tensor) -> Tensor:
    return x.view(like.shape[1], like.shape[0], *x.shape[1:]).transpose(0, 1)


class _Scores:
    """Softmax of the scores of some heads at a time, in a buffer that serves all of them."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, self.scale = q, k, q.shape[-1] ** -0.5
        self.size = max(1, min(len(q), AT_ONCE // max(1, q.shape[1] * k.shape[1])))
        self.buffer = q.new_empty(self.size, q.shape[1], k.shape[1])

    def parts(self) -> Iterator[slice]:
        return (
            slice(first, min(first + self.size, len(self.q))) for first in range(0, len(self.q), self.size)
        )

    def of(self, some: slice) -> Tensor:
        out = self.buffer[: some.stop - some.start]
        self.times(self.q[some], self.k[some].transpose(1, 2), out)
        return torch.softmax(out, -1, out=out)

    def times(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """out = scale a b."""
        torch.baddbmm(out, a, b, beta=0, alpha=self.scale, out=out)
