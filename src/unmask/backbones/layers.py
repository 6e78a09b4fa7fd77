"""Parts of transformers: rotary positions, attention beside what was read before, time embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.backbones import mixing, products
from unmask.backbones.again import again
from unmask.backbones.masks import Beside, Sight
from unmask.backbones.ragged import Asked, Packed

Angles: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin of what pairs of dimensions turn by; sin is negative for the first of each pair."""


class Rotary(nn.Module):
    """Rotary positions: dimensions i and i + d/2 of a head turn by position * base^(-2i/d)."""

    def __init__(self, head_width: int, base: float) -> None:
        super().__init__()
        self.base, self.head_width = base, head_width
        # Integers, because a network cast to bfloat16 must not round its positions' angles.
        self.register_buffer("even", torch.arange(0, head_width, 2), persistent=False)
        self.even: Tensor

    def angles(self, position: Tensor, dtype: torch.dtype = torch.float64) -> Angles:
        """cos and sin [n, head_width] of positions [n], or [B, 1, n, head_width] of those [B, n] of each
        row."""
        angle = position[..., None] * self.base ** -(self.even.double() / self.head_width)
        if position.ndim == 2:
            angle = angle[:, None]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn queries or keys [..., L, head_width] to their positions.

    (a, b) becomes (a cos - b sin, b cos + a sin): each dimension times cos, and its partner times sin.
    """
    cos, sin = (each.to(x.dtype) for each in angles)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Neighbours(nn.Module):
    """y_i = sum over o of w_o * x_(i+o), |o| <= taps // 2, each dimension by itself; padding and other
    documents are not looked at."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, width))
        nn.init.normal_(self.weight, std=taps**-0.5)

    def forward(self, x: Tensor, valid: Tensor | None, documents: Tensor | None) -> Tensor:
        """x [B, L, width]."""
        if valid is not None:
            x = x * valid[..., None]
        reach, length = len(self.weight) // 2, x.shape[1]
        around = F.pad(x, (0, 0, reach, reach))
        numbers = None if documents is None else F.pad(documents, (reach, reach), value=-1)
        y = torch.zeros_like(x)
        for tap, weight in enumerate(self.weight):
            part = around[:, tap : tap + length] * weight
            if documents is not None and numbers is not None:
                part = part * (numbers[:, tap : tap + length] == documents)[..., None]
            y = y + part
        return y

    def among(self, keys: Tensor, sight: Sight) -> Tensor:
        """The same for the queries of a call that sees keys [B, K, width] in some order."""
        reach, y = len(self.weight) // 2, torch.zeros(())
        for tap, weight in enumerate(self.weight):
            key, found = sight.neighbours(tap - reach)
            y = y + keys[:, key] * found[..., None] * weight
        return y


class _OfX(torch.autograd.Function):
    """A function for whose gradient x is kept, and nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], _: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _GELU(_OfX):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            return F.gelu(x)
        twice = 2 * math.sqrt(2 / math.pi)
        share = torch.addcmul(x.new_tensor(twice), x, x, value=0.044715 * twice).mul_(x).sigmoid_()
        return share.mul_(x)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        kind = "none" if x.dtype == torch.bfloat16 else "tanh"
        slope: Tensor = torch.ops.aten.gelu_backward(*outer, x, approximate=kind)
        return slope


class GELU(nn.Module):
    """x/2 (1 + tanh(c (x + 0.044715 x^3))) with c = sqrt(2/pi), which is x sigmoid(2c (x + 0.044715 x^3)).

    As a sigmoid it takes half the time on CPUs. In bfloat16 it is x Phi(x) there, in a quarter of the time:
    that is off by 0.0005 at most, an eighth of what a number of size 1 is rounded by.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.gelu(x, approximate="tanh")
        return _applied(_GELU, x)


class _SquaredReLU(_OfX):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        positive = x.relu()
        return positive.mul_(positive)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Tensor:
        (x,), (slope,) = ctx.saved_tensors, outer
        return torch.addcmul(x.new_zeros(()), slope, x.relu(), value=2)


class SquaredReLU(nn.Module):
    """max(x, 0)^2."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x.relu().square()
        return _applied(_SquaredReLU, x)


def _applied(function: type[_GELU | _SquaredReLU], x: Tensor) -> Tensor:
    """Where no gradient is needed, `apply` would cost more than a small function."""
    return function.apply(x) if x.requires_grad else function.forward(x)  # type: ignore[no-untyped-call]


class Gated(nn.Module):
    """SwiGLU: silu(a) b of the two halves of (a, b)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return again(F.silu, gate) * value


class TwoLayers(nn.Sequential):
    """A linear layer, an activation, and a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        first, activation, last = self
        if torch.is_grad_enabled():
            out: Tensor = last(again(activation, first(x)))
            return out
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        if isinstance(activation, GELU):
            return _linear(last, products.linear(x, first.weight, first.bias, gelu=True))
        return _linear(last, activation(_linear(first, x)))


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        out: Tensor = layer(x)
        return out
    return products.linear(x, layer.weight, layer.bias)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions; each of `kv_heads` serves several heads.

    `biased` queries and keys can prefer an offset, whatever they are queries and keys of; `bias` is the usual
    one, of queries, keys and values.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        causal: bool = False,
        biased: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads or heads, causal
        head_width = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * head_width, bias=bias)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(head_width) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_width) if qk_norm else nn.Identity()
        self.q_bias = nn.Parameter(torch.zeros(width)) if biased else None
        self.k_bias = nn.Parameter(torch.zeros(self.kv_heads * head_width)) if biased else None

    @torch.no_grad()
    def look_at(self, offsets: Sequence[int], strength: float, rotary: Rotary) -> None:
        """Start head h at offset o = offsets[h mod n], with `strength` added to its logit.

        A bias of (c, 0) in a turning pair of k, and of the same turned by o in q, adds
        c^2 cos(angle (j - i - o)) to the logit of j seen from i: largest at j = i + o. Fast pairs tell
        neighbours apart, so c is proportional to the angle.
        """
        assert self.q_bias is not None
        assert self.k_bias is not None
        head_width = len(self.q_bias) // self.heads
        c = rotary.base ** -(rotary.even.double() / head_width)
        c = c * (strength * head_width**0.5 / c.square().sum()) ** 0.5
        key = torch.cat([c, torch.zeros_like(c)])
        self.k_bias.copy_(key.repeat(self.kv_heads))
        for head, query in enumerate(self.q_bias.view(self.heads, head_width)):
            angles = rotary.angles(torch.tensor([offsets[head % len(offsets)]]))
            query.copy_(rotate(key[None], angles)[0])

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        seen: Any = None,
        beside: Beside | None = None,
        layer: int = 0,
        asked: Asked | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """`seen` [B or 1, 1, n or 1, K] is False where a query must not look at a key; or the `sparse`
        form. x [B, n, width], or [T, width] if `packed`, which is also what comes out."""
        if asked is not None:
            return self._at(asked, x, angles, seen, beside, layer)
        qkv = _linear(self.qkv, x)
        heads = _heads(qkv if packed is None else packed.spread(qkv), self.heads + 2 * self.kv_heads)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self._query(q, angles), self._key(k, angles)
        if beside is not None:
            k, v = beside.layer(layer, k, v)
        causal = self.causal and seen is None and bool(q.shape[-2] > 1)
        mixed = self._mixed(q, k, v, seen, causal)
        mixed = mixed.transpose(1, 2).flatten(2)
        return _linear(self.out, mixed if packed is None else packed.of(mixed))

    def _at(
        self,
        asked: Asked,
        x: Tensor,
        angles: Angles,
        seen: Tensor | None,
        beside: Beside | None,
        layer: int,
    ) -> Tensor:
        """The same at the asked positions only, [N, width]: keys and values of all, queries of these."""
        width = x.shape[-1]
        weight, bias = self.qkv.weight, self.qkv.bias
        of_queries, of_others = (None, None) if bias is None else (bias[:width], bias[width:])
        pairs = _heads(products.linear(x, weight[width:], of_others), 2 * self.kv_heads)
        k, v = pairs[:, : self.kv_heads], pairs[:, self.kv_heads :]
        k = self._key(k, angles)
        if beside is not None:
            k, v = beside.layer(layer, k, v)
        q = products.linear(asked.of(x), weight[:width], of_queries)
        q = self._query(q.view(-1, self.heads, 1, width // self.heads), _turned(asked, angles))
        if seen is not None and seen.shape[2] > 1:
            seen = asked.placed(asked.of(seen[:, 0].expand(len(x), -1, -1)), elsewhere=True)[:, None]
        mixed = self._mixed(asked.placed(q[:, :, 0]).transpose(1, 2), k, v, seen)
        return _linear(self.out, asked.taken(mixed.transpose(1, 2)).flatten(1))

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, seen: Any, causal: bool = False) -> Tensor:
        if seen is not None and not isinstance(seen, Tensor):
            return _flex()(q, k, v, block_mask=seen, enable_gqa=self.kv_heads != self.heads)
        if seen is None and not causal and mixing.pays(q, k):
            return mixing.mixed(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=self.kv_heads != self.heads
        )

    def _query(self, q: Tensor, angles: Angles) -> Tensor:
        """[..., heads, L, head_width], ready to be compared."""
        return _turned_by(angles, self.q_norm(q), self.q_bias)

    def _key(self, k: Tensor, angles: Angles) -> Tensor:
        return _turned_by(angles, self.k_norm(k), self.k_bias)


def _turned_by(angles: Angles, x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias of each head, turned; in the precision of x, which products are asked in."""
    return rotate(x if bias is None else x + bias.to(x.dtype).view(x.shape[-3], 1, -1), angles)


def _heads(lines: Tensor, count: int) -> Tensor:
    """[B, count, L, width] of lines [B, L, count * width], each head's part in one piece of memory: that
    takes one pass, and what is done with heads then takes half the time."""
    return torch.unflatten(lines, -1, (count, -1)).permute(2, 0, 1, 3).contiguous().transpose(0, 1)


def _turned(asked: Asked, angles: Angles) -> Angles:
    """Those [N, 1, 1, head_width] of the asked positions, of angles [L, ...] or [B, 1, L, ...]."""
    rows = (asked.position,) if angles[0].ndim == 2 else (asked.sequence, 0, asked.position)
    cos, sin = (each[rows][:, None, None] for each in angles)
    return cos, sin


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Tensor]:
    """Flex attention, compiled: without that it computes every pair and hides them afterwards."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


class TimeEmbedding(nn.Module):
    """A scalar [B, 1] or [B, L] as a vector: 128 cosines and sines of it, then a two-layer network."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = 128
        frequency = torch.exp(-math.log(10_000) / half * torch.arange(half, device=t.device))
        angle = (self.scale * t)[..., None] * frequency
        waves = torch.cat([angle.cos(), angle.sin()], dim=-1)
        out: Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return F.silu(out)
