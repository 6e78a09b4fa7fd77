"""DiT: a pre-norm transformer with rotary positions, conditioned on time only if asked to be.

With time conditioning each block is modulated by the time's embedding (adaLN: shift, scale and gate);
without it no such parameters exist, and it is a plain transformer. Its blocks may be Llama's, as in LLaDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.backbones.attention_mask import (
    FLEX_DEVICES,
    KVCache,
    KVCacheView,
    attention_context,
    flex_block_mask,
    kv_view,
)
from unmask.backbones.base import Backbone, BackboneConfig
from unmask.backbones.layers import (
    MLP,
    Attention,
    CosSin,
    DepthwiseConv,
    RotaryEmbedding,
    TimeEmbedding,
)
from unmask.context import Context
from unmask.ops.activations import GELU, SquaredReLU, SwiGLU
from unmask.ops.linear import Linear, cast_like_autocast
from unmask.ops.packing import PackedTokens, SelectedPositions
from unmask.ops.recompute import recompute_scope, recomputed
from unmask.types import Positions, Times, Tokens, Vocab

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": GELU,
    "relu2": SquaredReLU,
}
"""What may stand between a block's two linear layers."""

_MAX_OFFSET, _MAX_HEADS, _MAX_LENGTH = 1_000, 1_024, 1 << 24
"""Beyond what any network needs; larger numbers are mistakes, or meant to do harm."""


@dataclass(frozen=True)
class TimeConditioning:
    """The network is told the time, `scale` times over, through an embedding of this width."""

    width: int = 128
    scale: float = 1000.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"the width of a time embedding must be at least 1; got {self.width}")
        if not math.isfinite(self.scale):
            raise ValueError(f"the scale of a time must be a finite number; got {self.scale}")


@dataclass(frozen=True)
class LocalInit:
    """The network begins by looking at neighbours, and so leaves the unigram plateau at once.

    A convolution of `taps` over the embeddings, and biases of queries and keys that start the heads in
    turn at these `offsets`, with `strength` more in the attention logits. Wants a `rope_theta` of
    about 100, whose waves tell near positions apart.
    """

    kernel_size: int = 7
    offsets: tuple[int, ...] = (-1, 1, -2, 2)
    bias_scale: float = 8.0

    def __post_init__(self) -> None:
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"taps must be odd, so that they have a middle; got {self.kernel_size}")
        if not self.offsets:
            raise ValueError("a local start needs at least one offset to look at")
        if max(map(abs, self.offsets)) > _MAX_OFFSET:
            raise ValueError(f"offsets are those of neighbours, at most {_MAX_OFFSET:,} away; got {self.offsets}")
        if not math.isfinite(self.bias_scale):
            raise ValueError(f"strength must be a finite number; got {self.bias_scale}")


@dataclass(frozen=True)
class LlamaBlock:
    """Blocks as in Llama: RMSNorm, a gated network of width `hidden` (SwiGLU), hardly a bias.

    Each of `kv_heads` keys and values serves several heads; None for one each. `bias`: queries, keys and
    values have one, as in Qwen2.
    """

    intermediate_size: int
    kv_heads: int | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ValueError(f"the width of a gated network must be at least 1; got {self.intermediate_size}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(
                f"eps keeps a norm from dividing by 0: it must be above 0 and below 1; got {self.norm_eps}"
            )
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(f"kv_heads must be at least 1; got {self.kv_heads}")


@dataclass(frozen=True)
class DiTConfig(BackboneConfig):
    """Sizes and options of a DiT; `build(vocab)` makes it. The default is the paper's small model.

    `shift_logits`: a token is predicted where the one before it is read, as in networks that began as
    autoregressive ones.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    max_length: int = 1024
    dropout: float = 0.1
    causal: bool = False
    tie_embeddings: bool = False
    qk_norm: bool = False
    activation: str = "gelu"
    rope_theta: float = 10_000.0
    time_conditioning: TimeConditioning | None = None
    local_init: LocalInit | None = None
    llama: LlamaBlock | None = None
    shift_logits: bool = False

    def __post_init__(self) -> None:
        if self.causal and self.local_init is not None:
            raise ValueError("a local start looks to both sides, which a causal network must not")
        if self.causal and self.shift_logits:
            raise ValueError("a causal network reads its text one place late already: leave out shift_logits")
        if self.llama is not None and self.activation != "gelu":
            raise ValueError("blocks of Llama have an activation of their own: leave out activation")
        if self.llama is not None and self.heads % (self.llama.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.llama.kv_heads} keys and values evenly")
        for name in ("width", "depth", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name, most in (("heads", _MAX_HEADS), ("max_length", _MAX_LENGTH)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}; got {getattr(self, name):,}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be an even multiple of the {self.heads} heads"
                " (rotary positions turn pairs of dimensions)"
            )
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be {' or '.join(_ACTIVATIONS)}; got {self.activation!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta must be above 0 and finite; got {self.rope_theta}")

    def build_norm(self) -> nn.Module:
        """A norm of a block's inputs; a shift by adaLN takes the place of its own bias."""
        if self.llama is not None:
            return nn.RMSNorm(self.width, eps=self.llama.norm_eps)
        return nn.LayerNorm(self.width, bias=self.time_conditioning is None)

    def build(self, vocab: Vocab) -> DiT:
        return DiT(self, vocab)

    def with_causal(self, causal: bool) -> DiTConfig:
        """A causal network has no local start, which looks to both sides."""
        return replace(self, causal=causal, local_init=None if causal else self.local_init)


class Block(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)); at the `asked` positions, if given.

    x is [B, L, width], or [T, width] if `packed`.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, llama = config.width, config.llama
        self.norm1 = config.build_norm()
        self.attention = Attention(
            width,
            config.heads,
            kv_heads=None if llama is None else llama.kv_heads,
            qkv_bias=llama is not None and llama.qkv_bias,
            qk_norm=config.qk_norm,
            causal=config.causal,
            offset_bias=config.local_init is not None,
        )
        self.norm2 = config.build_norm()
        hidden = 4 * width if llama is None else llama.intermediate_size
        self.mlp = MLP(
            Linear(width, hidden if llama is None else 2 * hidden, bias=llama is None),
            _ACTIVATIONS[config.activation]() if llama is None else SwiGLU(),
            Linear(hidden, width, bias=llama is None),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.modulation = (
            None if config.time_conditioning is None else nn.Linear(config.time_conditioning.width, 6 * width)
        )

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
        attend, mlp, drop = self.attention, self.mlp, self.dropout
        if self.modulation is None or time_emb is None:
            mixed = attend(
                recomputed(_norm_and_cast, self.norm1, x),
                cos_sin,
                attn_mask,
                cache,
                layer_index,
                selected,
                packed,
            )
            x = (x if selected is None else selected.select(x)) + drop(mixed)
            x = x + drop(mlp(recomputed(_norm_and_cast, self.norm2, x)))
            return x
        parts = self.modulation(time_emb).chunk(6, dim=-1)
        shift, scale, *rest = parts if packed is None else map(packed.pack, parts)
        inputs = recomputed(_modulate_and_cast, self.norm1, x, shift, scale)
        mixed = attend(inputs, cos_sin, attn_mask, cache, layer_index, selected, packed)
        if selected is not None:
            x, *rest = (selected.select(each) for each in (x, *rest))
        gate1, shift, scale, gate2 = rest
        x = x + gate1 * drop(mixed)
        x = x + gate2 * drop(mlp(recomputed(_modulate_and_cast, self.norm2, x, shift, scale)))
        return x


def _norm_and_cast(norm: nn.Module, x: Tensor) -> Tensor:
    return cast_like_autocast(norm(x))


def _modulate_and_cast(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return cast_like_autocast(recomputed(norm, x) * (1 + scale) + shift)


class DiT(Backbone):
    """The network of `DiTConfig`."""

    def __init__(self, config: DiTConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config = config
        self.max_length, self.causal, self.time_conditioned = (
            config.max_length,
            config.causal,
            config.time_conditioning is not None,
        )
        self.shift_logits = config.shift_logits
        self.embedding = nn.Embedding(vocab.size, config.width)
        self.local_conv = (
            None if config.local_init is None else DepthwiseConv(config.width, config.local_init.kernel_size)
        )
        self.rotary = RotaryEmbedding(config.width // config.heads, config.rope_theta)
        self.time_embedding = (
            None
            if config.time_conditioning is None
            else TimeEmbedding(config.time_conditioning.width, config.time_conditioning.scale)
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = config.build_norm()
        self.modulation = (
            None if config.time_conditioning is None else nn.Linear(config.time_conditioning.width, 2 * config.width)
        )
        self.lm_head = Linear(config.width, vocab.size, bias=config.llama is None)
        self._init_weights()
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def encode(
        self,
        tokens: Tokens,
        t: Times,
        positions: Positions | None = None,
        context: Context = Context(),
    ) -> Tensor:
        if isinstance(positions, tuple):  # in any order, and some perhaps twice
            flags = torch.zeros_like(tokens, dtype=torch.bool)
            flags[positions] = True
            number = (flags.flatten().cumsum(0) - 1).view(flags.shape)[positions]
            return self.encode(tokens, t, flags, context)[number]
        if self.shift_logits and positions is None:
            everywhere = torch.ones_like(tokens, dtype=torch.bool)
            return self.encode(tokens, t, everywhere, context).view(*tokens.shape, -1)
        view = attention_context(tokens.shape[1], tokens.device, causal=self.causal, context=context)
        stages, cache = context.stages, kv_view(context)
        x: Tensor = self.embedding(tokens)
        if self.local_conv is not None:
            if stages is None and cache is None:
                x = x + self.local_conv(x, context.valid, context.document_ids)
            else:
                x = x + self.local_conv.gathered(x if cache is None else cache.update_embeddings(x), view)
        taken: Tensor | None = None
        if self.shift_logits and positions is not None:
            positions, taken = view.previous_positions(positions)
        time = None if self.time_embedding is None else self.time_embedding(t)
        angles, seen = self.rotary.cos_sin(view.position_ids, x.dtype), view.mask
        whole = (
            flex_block_mask(seen) if stages is not None and seen is not None and x.device.type in FLEX_DEVICES else seen
        )
        *first, last = self.blocks
        packed = None
        if first and view.valid is not None and stages is None and cache is None:
            packed = PackedTokens.if_sparse(view.valid if positions is None else view.valid | positions)
        x = x if packed is None else packed.pack(x)
        for layer, block in enumerate(first):
            x = self._run_block(block, x, time, angles, whole, cache, layer, None, packed)
        x = x if packed is None else packed.unpack(x)
        # Nobody looks at the last layer's output but who asked for it.
        asked = None
        if positions is not None and not self.causal:
            asked = SelectedPositions.if_sparse(positions)
        x = self._run_block(last, x, time, angles, seen, cache, len(first), asked)
        if positions is not None and asked is None:
            x = x[positions]
        x = self.norm(x)
        if self.modulation is not None and time is not None:
            if positions is not None:
                time = time.expand(*tokens.shape, -1)[positions]
            shift, scale = self.modulation(time).chunk(2, dim=-1)
            x = x * (1 + scale) + shift
        return x if taken is None else x[taken]

    def new_cache(self) -> KVCache:
        return KVCache()

    def _run_block(self, block: nn.Module, *inputs: object) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return out
        with recompute_scope():
            out = block(*inputs)
            return out

    @torch.no_grad()
    def init_output_bias(self, logits: Tensor) -> None:
        if self.lm_head.bias is None:
            raise ValueError("a head without a bias cannot begin with frequencies; set unigram_bias_init=false")
        self.lm_head.bias.copy_(logits)

    def _init_weights(self) -> None:
        """Blocks start small, modulation and an untied head at zero: the first prediction is then uniform."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.attention.out, block.mlp[2]):
                assert isinstance(last, nn.Linear)
                nn.init.normal_(last.weight, std=0.02 / (2 * self.config.depth) ** 0.5)
            if self.config.local_init is not None:
                block.attention.init_offset_bias(
                    self.config.local_init.offsets, self.config.local_init.bias_scale, self.rotary
                )
            if block.modulation is not None:
                # Gates start at one, so that blocks learn from the first step as a plain transformer's do.
                nn.init.zeros_(block.modulation.weight)
                with torch.no_grad():
                    block.modulation.bias.view(6, -1)[[2, 5]] = 1
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
        if not self.config.tie_embeddings:
            nn.init.zeros_(self.lm_head.weight)
