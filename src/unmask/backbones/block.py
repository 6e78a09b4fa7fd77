"""The block of a transformer: attention and an MLP, each around a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unmask.backbones.cache import KVCacheView
from unmask.backbones.layers import MLP, Attention, CosSin, RotaryEmbedding
from unmask.backbones.moe import MixtureOfExperts
from unmask.ops.activations import GELU, SquaredReLU
from unmask.ops.linear import Linear, cast_like_autocast
from unmask.ops.packing import PackedTokens, SelectedPositions
from unmask.ops.recompute import recomputed

if TYPE_CHECKING:
    from unmask.backbones.dit import DiTConfig

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": GELU, "relu2": SquaredReLU}
"""The choices for the activation of an MLP."""


class Block(nn.Module):
    """x + gate1 attention(norm1(x)), then x + gate2 mlp(norm2(x)).

    With time conditioning (adaLN) a norm is norm(x) (1 + scale) + shift, and shifts, scales and gates are
    linear in the time embedding; without it there are none of the three.
    """

    def __init__(self, config: DiTConfig, index: int = 0) -> None:
        super().__init__()
        width, llama = config.width, config.llama
        self.norm1 = config.build_norm()
        self.attention = Attention(
            width,
            config.heads,
            head_dim=config.head_dim,
            kv_heads=None if llama is None else llama.kv_heads,
            qkv_bias=llama is not None and llama.qkv_bias,
            qk_norm=config.qk_norm,
            norm_eps=None if llama is None else llama.norm_eps,
            causal=config.causal,
            offset_bias=config.local_init is not None,
        )
        self.norm2 = config.build_norm()
        self.mlp = _build_mlp(config, index)
        self.dropout = nn.Dropout(config.dropout)
        self.modulation = config.build_modulation(6)

    def init_weights(self, config: DiTConfig, rotary: RotaryEmbedding) -> None:
        """Start with small outputs, heads at their offsets and gates at one."""
        std = 0.02 / (2 * config.depth) ** 0.5
        nn.init.normal_(self.attention.out.weight, std=std)
        self.mlp.init_output(std)
        if config.local_init is not None:
            self.attention.init_offset_bias(config.local_init.offsets, config.local_init.bias_scale, rotary)
        if self.modulation is not None:
            # With gates at one, blocks learn from the first step on, as those of a plain transformer do.
            nn.init.zeros_(self.modulation.weight)
            with torch.no_grad():
                self.modulation.bias.view(6, -1)[[2, 5]] = 1

    def forward(
        self,
        x: Tensor,
        time_emb: Tensor | None,
        cos_sin: CosSin,
        attn_mask: Any = None,
        cache: KVCacheView | None = None,
        layer_index: int = 0,
        selected: SelectedPositions | None = None,
        packed: PackedTokens | None = None,
    ) -> Tensor:
        """x [B, L, width], or [T, width] if `packed`; at the `selected` positions the output is [N, width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self._modulate(time_emb, packed)
        normed = recomputed(modulated_norm, self.norm1, x, shift1, scale1)
        attended = self.attention(normed, cos_sin, attn_mask, cache, layer_index, selected, packed)
        if selected is not None:
            x = selected.select(x)
            gate1, shift2, scale2, gate2 = (_select(selected, part) for part in (gate1, shift2, scale2, gate2))
        x = x + _gated(gate1, self.dropout(attended))
        normed = recomputed(modulated_norm, self.norm2, x, shift2, scale2)
        return x + _gated(gate2, self.dropout(self.mlp(normed)))

    def _modulate(self, time_emb: Tensor | None, packed: PackedTokens | None) -> tuple[Tensor | None, ...]:
        """Shift, scale and gate of the attention, then those of the MLP."""
        if self.modulation is None or time_emb is None:
            return (None,) * 6
        parts = self.modulation(time_emb).chunk(6, dim=-1)
        return tuple(parts if packed is None else map(packed.pack, parts))


def _build_mlp(config: DiTConfig, index: int) -> MLP | MixtureOfExperts:
    width, llama = config.width, config.llama
    if llama is None:
        activation = ACTIVATIONS[config.activation]()
        return MLP(Linear(width, 4 * width), activation, Linear(4 * width, width))
    experts = config.experts_of_layer(index)
    return MLP.swiglu(width, llama.intermediate_size) if experts is None else MixtureOfExperts(width, experts)


def modulated_norm(norm: nn.Module, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """norm(x) (1 + scale) + shift, in the type in which linear layers read it."""
    if shift is None or scale is None:
        return cast_like_autocast(norm(x))
    return cast_like_autocast(recomputed(norm, x) * (1 + scale) + shift)


def _gated(gate: Tensor | None, x: Tensor) -> Tensor:
    return x if gate is None else gate * x


def _select(selected: SelectedPositions, values: Tensor | None) -> Tensor | None:
    return None if values is None else selected.select(values)
