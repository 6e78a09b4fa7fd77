"""Attention in bfloat16 on CPUs: softmax(q k^T / sqrt(width)) v for a few whole heads at a time.

torch's kernel multiplies small tiles, at a quarter of the speed that bfloat16 products reach on CPUs. Here
whole heads are multiplied, as many at a time as have their scores in the cache. The backward pass recomputes
the scores unless sequences are short. With masks, other types or other devices, torch's kernel is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unmask.ops.switch import fast_paths_enabled

_CHUNK_SCORES = 1 << 21
"""Scores computed at a time: 4 MB, which fit into the cores' caches."""

_KEEP_PROBS_RATIO = 4
"""Probabilities are saved for up to this many keys per head dimension: no more memory than a layer's MLP takes."""

_MAX_SCORES = 1 << 22
"""Scores of one head above which torch's kernel, which never has all of them in memory, is better."""


def attention_reference(
    q: Float[Tensor, "B heads n width"],
    k: Float[Tensor, "B key_heads K width"],
    v: Float[Tensor, "B key_heads K width"],
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "B heads n width"]:
    """softmax(q k^T / sqrt(width)) v [B, heads, n, width]; a key head may serve several query heads."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=causal, enable_gqa=gqa)


def attention(
    q: Float[Tensor, "B heads n width"],
    k: Float[Tensor, "B key_heads K width"],
    v: Float[Tensor, "B key_heads K width"],
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "B heads n width"]:
    """`attention_reference`, by whole heads where that is faster."""
    if attn_mask is None and not causal and _is_faster(q, k):
        return _attention_by_heads(q, k, v)
    return attention_reference(q, k, v, attn_mask, causal=causal)


def _is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether this module is faster than torch for q [B, heads, n, width] and k [B, heads, K, width]."""
    return (
        fast_paths_enabled()
        and q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[1] == k.shape[1]
        and q.shape[2] * k.shape[2] <= _MAX_SCORES
        and not torch.compiler.is_compiling()
    )


def _attention_by_heads(
    q: Float[Tensor, "B heads n width"], k: Float[Tensor, "B heads K width"], v: Float[Tensor, "B heads K width"]
) -> Float[Tensor, "B heads n width"]:
    keep_probs = torch.is_grad_enabled() and k.shape[2] <= _KEEP_PROBS_RATIO * k.shape[3]
    out: Tensor = _Attention.apply(q, k, v, keep_probs)[0]  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, keep_probs: bool) -> tuple[Tensor, Tensor]:
        """The output, and the probabilities of all heads if they are kept."""
        queries, keys, values = _fold_heads(q, k, v)
        out, buffer = torch.empty_like(queries), _probs_buffer(queries, keys, whole=keep_probs)
        for chunk in _chunks(queries, keys):
            p = _probabilities(queries[chunk], keys[chunk], buffer[chunk] if keep_probs else buffer)
            torch.bmm(p, values[chunk], out=out[chunk])
        return _unfold_heads(out, q), buffer if keep_probs else q.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.keep_probs = inputs
        ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)  # or zeros would be made as the gradient of the probabilities
        ctx.save_for_backward(*tensors, outputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """With p the softmax of scores s = c q k^T and D the output's gradient: dv = p^T D, dp = D v^T,
        ds = p (dp - sum(p dp)), dq = c ds k, dk = c ds^T q."""
        *inputs, probs = ctx.saved_tensors
        q, k, v, grad = _fold_heads(*inputs, grad)
        grad_q, grad_k, grad_v = (torch.empty_like(tensor) for tensor in (q, k, v))
        buffer, scale = probs if ctx.keep_probs else _probs_buffer(q, k, whole=False), q.shape[-1] ** -0.5
        for chunk in _chunks(q, k):
            p = probs[chunk] if ctx.keep_probs else _probabilities(q[chunk], k[chunk], buffer)
            torch.bmm(p.transpose(1, 2), grad[chunk], out=grad_v[chunk])
            dp = grad[chunk] @ v[chunk].transpose(1, 2)
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _scaled_bmm(ds, k[chunk], scale, grad_q[chunk])
            _scaled_bmm(ds.transpose(1, 2), q[chunk], scale, grad_k[chunk])
        grads = zip((grad_q, grad_k, grad_v), inputs, strict=True)
        return *(_unfold_heads(gradient, like) for gradient, like in grads), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, None]]:
        *tensors, keep_probs = inputs
        batched = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, dims[:-1], strict=True)
        )
        q, k, v = (tensor.flatten(0, 1) for tensor in batched)
        out, probs = _Attention.apply(q, k, v, keep_probs)  # type: ignore[no-untyped-call]
        return (torch.unflatten(out, 0, (info.batch_size, -1)), probs), (0, None)


def _fold_heads(*tensors: Tensor) -> Iterator[Tensor]:
    """[heads B, n, width] of [B, heads, n, width], each head contiguous in memory."""
    return (x.transpose(0, 1).flatten(0, 1).contiguous() for x in tensors)


def _unfold_heads(
    x: Float[Tensor, "heads_B n width"], like: Float[Tensor, "B heads n width"]
) -> Float[Tensor, "B heads n width"]:
    return x.view(like.shape[1], like.shape[0], *x.shape[1:]).transpose(0, 1)


def _heads_per_chunk(q: Tensor, k: Tensor) -> int:
    return max(1, min(len(q), _CHUNK_SCORES // max(1, q.shape[1] * k.shape[1])))


def _chunks(q: Float[Tensor, "heads n width"], k: Float[Tensor, "heads K width"]) -> Iterator[slice]:
    size = _heads_per_chunk(q, k)
    return (slice(first, min(first + size, len(q))) for first in range(0, len(q), size))


def _probs_buffer(
    q: Float[Tensor, "heads n width"], k: Float[Tensor, "heads K width"], *, whole: bool
) -> Float[Tensor, "_ n K"]:
    """Memory for the probabilities of all heads, or of one chunk of them."""
    return q.new_empty(len(q) if whole else _heads_per_chunk(q, k), q.shape[1], k.shape[1])


def _probabilities(
    q: Float[Tensor, "heads n width"], k: Float[Tensor, "heads K width"], buffer: Float[Tensor, "_ n K"]
) -> Float[Tensor, "heads n K"]:
    """softmax(q k^T / sqrt(width)) of a chunk of heads, at the beginning of the buffer."""
    out = buffer[: len(q)]
    _scaled_bmm(q, k.transpose(1, 2), q.shape[-1] ** -0.5, out)
    return torch.softmax(out, -1, out=out)


def _scaled_bmm(
    a: Float[Tensor, "heads n k"], b: Float[Tensor, "heads k m"], scale: float, out: Float[Tensor, "heads n m"]
) -> None:
    """out = scale a b."""
    torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)
