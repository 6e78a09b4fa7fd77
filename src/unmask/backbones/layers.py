"""Layers of transformers: rotary positions, convolution, MLP, attention with a KV cache, time embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.backbones.attention_mask import AttentionLayout
from unmask.backbones.cache import KVCacheView
from unmask.ops.activations import SwiGLU
from unmask.ops.cpu_attention import attention
from unmask.ops.linear import Linear, linear_activation, linear_split
from unmask.ops.packing import PackedTokens, SelectedPositions

CosSin: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin of the rotary angles; sin is negative for the first dimension of each pair."""


@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3 stretches its rotary positions for longer texts: slow rotations are made slower, fast ones stay.

    A rotation that turns more than `high_frequency_factor` times within `original_length` stays as it is, one that
    turns less than `low_frequency_factor` times becomes `factor` times slower, and in between it is interpolated.
    """

    factor: float
    """How many times slower the slow rotations become."""
    low_frequency_factor: float
    """Turns within `original_length` below which a rotation is slow."""
    high_frequency_factor: float
    """Turns within `original_length` above which a rotation is fast."""
    original_length: int
    """Tokens of the texts that the network was first trained on."""

    def __post_init__(self) -> None:
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor < math.inf
        if not (ordered and 1 <= self.factor < math.inf and self.original_length >= 1):
            raise ValueError(
                "a scaling of rotary positions needs a factor of at least 1, 0 < low_frequency_factor <"
                f" high_frequency_factor, and an original_length of at least 1; got {self}"
            )

    def stretch(self, frequency: Tensor) -> Tensor:
        """Angles per position."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_length * frequency / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class RotaryEmbedding(nn.Module):
    """Rotary positions: dimensions i and i + d/2 of a head are rotated by position * theta^(-2i/d)."""

    def __init__(self, head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        super().__init__()
        self.theta, self.head_dim, self.scaling = theta, head_dim, scaling
        # Integers, so that casting the network to bfloat16 does not round the angles.
        self.register_buffer("even_dims", torch.arange(0, head_dim, 2), persistent=False)
        self.even_dims: Tensor

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float64) -> CosSin:
        """cos and sin [n, head_dim] of positions [n], or [B, 1, n, head_dim] of positions [B, n]."""
        frequency = self.theta ** -(self.even_dims.double() / self.head_dim)
        angle = positions[..., None] * (frequency if self.scaling is None else self.scaling.stretch(frequency))
        if positions.ndim == 2:
            angle = angle[:, None]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def _apply_rotary(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate queries or keys [..., L, head_dim] by the angles of their positions.

    (a, b) becomes (a cos - b sin, b cos + a sin): each dimension times cos, and its partner times sin. Dimensions
    beyond those of the angles stay as they are.
    """
    cos, sin = (each.to(x.dtype) for each in cos_sin)
    if cos.shape[-1] < x.shape[-1]:
        size = cos.shape[-1]
        return torch.cat([_apply_rotary(x[..., :size], (cos, sin)), x[..., size:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class DepthwiseConv(nn.Module):
    """y_i = sum over o of w_o * x_(i+o), |o| <= kernel_size // 2, per dimension; padding and other documents
    count as zero."""

    def __init__(self, width: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel_size, width))
        nn.init.normal_(self.weight, std=kernel_size**-0.5)

    def forward(self, x: Tensor, valid: Tensor | None, document_ids: Tensor | None) -> Tensor:
        """x [B, L, width]."""
        if valid is not None:
            x = x * valid[..., None]
        reach, length = len(self.weight) // 2, x.shape[1]
        around = F.pad(x, (0, 0, reach, reach))
        numbers = None if document_ids is None else F.pad(document_ids, (reach, reach), value=-1)
        y = torch.zeros_like(x)
        for tap, weight in enumerate(self.weight):
            part = around[:, tap : tap + length] * weight
            if document_ids is not None and numbers is not None:
                part = part * (numbers[:, tap : tap + length] == document_ids)[..., None]
            y = y + part
        return y

    def gathered(self, keys: Tensor, context: AttentionLayout) -> Tensor:
        """The same for queries whose neighbours are among the keys [B, K, width], in any order."""
        reach, y = len(self.weight) // 2, torch.zeros(())
        for tap, weight in enumerate(self.weight):
            key, found = context.relative_keys(tap - reach)
            at_key = keys[:, key[0]] if len(key) == 1 else keys.take_along_dim(key[..., None], 1)
            y = y + at_key * found[..., None] * weight
        return y


class MLP(nn.Sequential):
    """A linear layer, an activation, and a linear layer."""

    @classmethod
    def swiglu(cls, width: int, hidden: int) -> Self:
        """down(silu(gate x) * up x), with gate and up in one matrix and no biases."""
        return cls(Linear(width, 2 * hidden, bias=False), SwiGLU(), Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        up, activation, down = self
        out: Tensor = down(linear_activation(up, activation, x))
        return out

    def init_output(self, std: float) -> None:
        """Draw the last layer."""
        last = self[2]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=std)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions; each of `kv_heads` is shared by several query heads.

    With `offset_bias`, heads have biases of queries and keys by which they can attend to a fixed offset; `qkv_bias` is
    the usual bias of the projection.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        causal: bool = False,
        offset_bias: bool = False,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads or heads, causal
        self.head_dim = head_dim or width // heads
        queries, keys = heads * self.head_dim, self.kv_heads * self.head_dim
        self.qkv = Linear(width, queries + 2 * keys, bias=qkv_bias)
        self.out = Linear(queries, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.q_bias = nn.Parameter(torch.zeros(queries)) if offset_bias else None
        self.k_bias = nn.Parameter(torch.zeros(keys)) if offset_bias else None

    @torch.no_grad()
    def init_offset_bias(self, offsets: Sequence[int], scale: float, rotary: RotaryEmbedding) -> None:
        """Initialize head h to attend to offset o = offsets[h mod n], by adding `scale` to its logit.

        A bias of (c, 0) in a rotary pair of k, and the same rotated by o in q, adds c^2 cos(angle (j - i - o)) to the
        logit of key j at query i, which is largest at j = i + o. Pairs of high frequency distinguish neighbours, so c
        is proportional to the angle.
        """
        assert self.q_bias is not None
        assert self.k_bias is not None
        head_width = len(self.q_bias) // self.heads
        c = rotary.theta ** -(rotary.even_dims.double() / head_width)
        c = c * (scale * head_width**0.5 / c.square().sum()) ** 0.5
        key = torch.cat([c, torch.zeros_like(c)])
        self.k_bias.copy_(key.repeat(self.kv_heads))
        for head, query in enumerate(self.q_bias.view(self.heads, head_width)):
            angles = rotary.cos_sin(torch.tensor([offsets[head % len(offsets)]]))
            query.copy_(_apply_rotary(key[None], angles)[0])

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin,
        attn_mask: Any = None,
        cache: KVCacheView | None = None,
        layer_index: int = 0,
        selected: SelectedPositions | None = None,
        packed: PackedTokens | None = None,
    ) -> Tensor:
        """Attention of x [B, n, width], or [T, width] if `packed`; the output has the same shape.

        `attn_mask` [B or 1, 1, n or 1, K] is False where a query must not attend to a key; or a block mask of flex
        attention.
        """
        if selected is not None:
            return self._forward_selected(selected, x, cos_sin, attn_mask, cache, layer_index)
        qkv = self.qkv(x)
        heads = _split_heads(qkv if packed is None else packed.unpack(qkv), self.heads + 2 * self.kv_heads)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self._rotate_query(q, cos_sin), self._rotate_key(k, cos_sin)
        if cache is not None:
            k, v = cache.update(layer_index, k, v)
        causal = self.causal and attn_mask is None and bool(q.shape[-2] > 1)
        attended = self._attend(q, k, v, attn_mask, causal).transpose(1, 2).flatten(2)
        out: Tensor = self.out(attended if packed is None else packed.pack(attended))
        return out

    def _forward_selected(
        self,
        selected: SelectedPositions,
        x: Tensor,
        cos_sin: CosSin,
        attn_mask: Tensor | None,
        cache: KVCacheView | None,
        layer_index: int,
    ) -> Tensor:
        """The output at the selected positions only, [N, width]: queries of these, keys and values of all."""
        q, kv = linear_split(self.qkv, selected.select(x), x, self.heads * self.head_dim)
        kv = _split_heads(kv, 2 * self.kv_heads)
        k, v = kv[:, : self.kv_heads], kv[:, self.kv_heads :]
        k = self._rotate_key(k, cos_sin)
        if cache is not None:
            k, v = cache.update(layer_index, k, v)
        q = self._rotate_query(q.view(-1, self.heads, 1, self.head_dim), _select_cos_sin(selected, cos_sin))
        if attn_mask is not None and attn_mask.shape[2] > 1:
            attn_mask = selected.pad(selected.select(attn_mask[:, 0].expand(len(x), -1, -1)), fill=True)[:, None]
        attended = self._attend(selected.pad(q[:, :, 0]).transpose(1, 2), k, v, attn_mask)
        out: Tensor = self.out(selected.unpad(attended.transpose(1, 2)).flatten(1))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, causal: bool = False) -> Tensor:
        if attn_mask is not None and not isinstance(attn_mask, Tensor):
            return _flex_attention()(q, k, v, block_mask=attn_mask, enable_gqa=self.kv_heads != self.heads)
        return attention(q, k, v, attn_mask, causal=causal)

    def _rotate_query(self, q: Tensor, cos_sin: CosSin) -> Tensor:
        """Queries [..., heads, L, head_dim], normalized and rotated."""
        return _bias_and_rotate(cos_sin, self.q_norm(q), self.q_bias)

    def _rotate_key(self, k: Tensor, cos_sin: CosSin) -> Tensor:
        return _bias_and_rotate(cos_sin, self.k_norm(k), self.k_bias)


def _bias_and_rotate(cos_sin: CosSin, x: Tensor, bias: Tensor | None) -> Tensor:
    """x plus the bias of each head, rotated, in the dtype of x."""
    return _apply_rotary(x if bias is None else x + bias.to(x.dtype).view(x.shape[-3], 1, -1), cos_sin)


def _split_heads(x: Tensor, count: int) -> Tensor:
    """[B, count, L, width] of x [B, L, count * width], with each head contiguous in memory.

    That takes one pass over x, and halves the time of the operations on heads.
    """
    return torch.unflatten(x, -1, (count, -1)).permute(2, 0, 1, 3).contiguous().transpose(0, 1)


def _select_cos_sin(selected: SelectedPositions, cos_sin: CosSin) -> CosSin:
    """[N, 1, 1, head_dim] at the selected positions, of cos and sin [L, ...] or [B, 1, L, ...]."""
    rows = (selected.position,) if cos_sin[0].ndim == 2 else (selected.sequence, 0, selected.position)
    cos, sin = (each[rows][:, None, None] for each in cos_sin)
    return cos, sin


@lru_cache(maxsize=1)
def _flex_attention() -> Callable[..., Tensor]:
    """Compiled flex attention: without compilation it computes all pairs and masks them afterwards."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


class TimeEmbedding(nn.Module):
    """An embedding of each time [B, 1] or [B, L]: 128 cosines and 128 sines through a two-layer MLP."""

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
