"""Attention in bfloat16 on CPUs: softmax(q k^T / sqrt(width)) v, a few heads at a time.

torch's own kernel multiplies small tiles, at a quarter of the speed that bfloat16 products reach here. Whole
heads are multiplied instead, as many as have their scores in the cache; the backward pass computes the scores
again, unless rows are short. Where this does not apply (masks, other precisions and devices) it is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_SCORES = 1 << 21
"""Scores that exist at a time: 4 MB, which the cores' caches hold."""

_KEEP_PROBS_RATIO = 4
"""Keys, in widths of a head, up to which probabilities are kept: no more memory than a layer's MLP takes."""

_MAX_SCORES = 1 << 22
"""Scores of one head beyond which torch's kernel, which never has all of them, is the better one."""


def is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether queries [B, heads, n, width] and keys [B, heads, K, width] are mixed faster here."""
    return (
        q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[1] == k.shape[1]
        and q.shape[2] * k.shape[2] <= _MAX_SCORES
        and not torch.compiler.is_compiling()
    )


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, heads, n, width], everything seeing everything."""
    keep = torch.is_grad_enabled() and k.shape[2] <= _KEEP_PROBS_RATIO * k.shape[3]
    out: Tensor = _Attention.apply(q, k, v, keep)[0]  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, keep_probs: bool) -> tuple[Tensor, Tensor]:
        """What is mixed, and the probabilities of all heads, if they are kept."""
        queries, keys, values = _fold_heads(q, k, v)
        out, buffer = torch.empty_like(queries), _probs_buffer(queries, keys, whole=keep_probs)
        for some in _chunks(queries, keys):
            p = _probabilities(queries[some], keys[some], buffer[some] if keep_probs else buffer)
            torch.bmm(p, values[some], out=out[some])
        return _unfold_heads(out, q), buffer if keep_probs else q.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.kept = inputs
        ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)  # or a gradient of zeros would be made for what is kept
        ctx.save_for_backward(*tensors, outputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """With p the softmax of scores s = c q k^T, and D the slope: dv = p^T D, dp = D v^T,
        ds = p (dp - sum(p dp)), dq = c ds k, dk = c ds^T q."""
        *inputs, kept = ctx.saved_tensors
        q, k, v, grad = _fold_heads(*inputs, grad)
        to_q, to_k, to_v = (torch.empty_like(each) for each in (q, k, v))
        buffer, scale = kept if ctx.kept else _probs_buffer(q, k, whole=False), q.shape[-1] ** -0.5
        for some in _chunks(q, k):
            p = kept[some] if ctx.kept else _probabilities(q[some], k[some], buffer)
            torch.bmm(p.transpose(1, 2), grad[some], out=to_v[some])
            dp = grad[some] @ v[some].transpose(1, 2)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _scaled_bmm(ds, k[some], scale, to_q[some])
            _scaled_bmm(ds.transpose(1, 2), q[some], scale, to_k[some])
        return *(_unfold_heads(*pair) for pair in zip((to_q, to_k, to_v), inputs, strict=True)), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, None]]:
        *tensors, keep = inputs
        many = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip(tensors, dims[:-1], strict=True)
        )
        q, k, v = (each.flatten(0, 1) for each in many)
        out, kept = _Attention.apply(q, k, v, keep)  # type: ignore[no-untyped-call]
        return (torch.unflatten(out, 0, (info.batch_size, -1)), kept), (0, None)


def _fold_heads(*tensors: Tensor) -> Iterator[Tensor]:
    """[heads B, n, width] of [B, heads, n, width], each head's lines one after another in memory."""
    return (x.transpose(0, 1).flatten(0, 1).contiguous() for x in tensors)


def _unfold_heads(x: Tensor, like: Tensor) -> Tensor:
    return x.view(like.shape[1], like.shape[0], *x.shape[1:]).transpose(0, 1)


def _heads_per_chunk(q: Tensor, k: Tensor) -> int:
    """Heads that are mixed at a time."""
    return max(1, min(len(q), _CHUNK_SCORES // max(1, q.shape[1] * k.shape[1])))


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    size = _heads_per_chunk(q, k)
    return (slice(first, min(first + size, len(q))) for first in range(0, len(q), size))


def _probs_buffer(q: Tensor, k: Tensor, *, whole: bool) -> Tensor:
    """For the probabilities of all heads, or of those that are mixed at a time."""
    return q.new_empty(len(q) if whole else _heads_per_chunk(q, k), q.shape[1], k.shape[1])


def _probabilities(q: Tensor, k: Tensor, buffer: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(width)) of some heads, at the beginning of the buffer."""
    out = buffer[: len(q)]
    _scaled_bmm(q, k.transpose(1, 2), q.shape[-1] ** -0.5, out)
    return torch.softmax(out, -1, out=out)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """out = scale a b."""
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)
