"""Parts of transformers: rotary positions, attention with a key-value cache, time embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Rotary(nn.Module):
    """Rotary positions: dimensions i and i + d/2 of a head turn by position * base^(-2i/d)."""

    def __init__(self, head_width: int, base: float) -> None:
        super().__init__()
        self.base, self.head_width = base, head_width
        # Integers, because a network cast to bfloat16 must not round its positions' angles.
        self.register_buffer("even", torch.arange(0, head_width, 2), persistent=False)
        self.even: Tensor

    def angles(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, head_width] of the positions start, start + 1, ..."""
        position = torch.arange(start, start + length, device=self.even.device)
        angle = position[:, None] * self.base ** -(self.even.double() / self.head_width)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys [..., L, head_width] to their positions."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)


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


class KVCache:
    """Keys and values of the positions that a causal network has already read, one pair a layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """Positions read so far by every layer."""
        return self.layers[-1][0].shape[-2] if self.layers else 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of `layer`, the new ones last."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = (torch.cat([old_keys, keys], -2), torch.cat([old_values, values], -2))
        return self.layers[layer]


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions; `biased` queries and keys can prefer an offset."""

    def __init__(self, width: int, heads: int, qk_norm: bool, causal: bool, biased: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        head_width = width // heads
        self.q_norm = nn.RMSNorm(head_width) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_width) if qk_norm else nn.Identity()
        self.q_bias = nn.Parameter(torch.zeros(width)) if biased else None
        self.k_bias = nn.Parameter(torch.zeros(width)) if biased else None

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
        self.k_bias.copy_(key.repeat(self.heads))
        for head, query in enumerate(self.q_bias.view(self.heads, head_width)):
            angles = rotary.angles(offsets[head % len(offsets)], 1)
            query.copy_(rotate(key[None], angles)[0])

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        seen: Tensor | None,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        """`seen` [B, 1, 1 or L, L] is False where a query must not look at a key."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.q_bias is not None and self.k_bias is not None:
            q = q + self.q_bias.view(self.heads, 1, -1)
            k = k + self.k_bias.view(self.heads, 1, -1)
        q, k = rotate(q, angles), rotate(k, angles)
        fresh = cache is None or len(cache.layers) == layer
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        if self.causal and not (fresh and seen is None):
            seen = _causal_mask(q.shape[-2], k.shape[-2], q.device, seen)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=self.causal and seen is None
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _causal_mask(queries: int, keys: int, device: torch.device, seen: Tensor | None) -> Tensor:
    """[queries, keys] booleans for queries that are the last positions of the keys."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if seen is None else mask & seen


def attention_mask(valid: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """[B, 1, 1 or L, L] booleans, False where nobody may look: at padding, into other documents."""
    if documents is None:
        return None if valid is None else valid[:, None, None, :]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same if valid is None else same & valid[:, None, None, :]


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
