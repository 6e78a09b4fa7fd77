"""DiT: a pre-norm transformer with rotary positions, with or without time conditioning.

With time conditioning each block is modulated by the time embedding (adaLN: shift, scale and gate).
Without it there are no such parameters, and it is a plain transformer. Its blocks may be those of Llama.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.backbones._embedding import Embedding
from unmask.backbones.attention_mask import (
    FLEX_DEVICES,
    AttentionLayout,
    attention_layout,
    flex_block_mask,
)
from unmask.backbones.base import Backbone, BlockStackConfig, Capabilities
from unmask.backbones.block import ACTIVATIONS, Block
from unmask.backbones.cache import KVCache, kv_view
from unmask.backbones.layers import DepthwiseConv, RotaryEmbedding, RotaryScaling, TimeEmbedding
from unmask.backbones.moe import Experts, MixtureOfExperts
from unmask.context import Context
from unmask.ops.linear import Linear
from unmask.ops.packing import PackedTokens, SelectedPositions
from unmask.ops.recompute import recompute_scope
from unmask.types import Positions, Queries, Times, Tokens, Vocab

_MAX_OFFSET, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_LENGTH = 1_000, 1_024, 1 << 16, 1 << 24
"""No network needs more; larger numbers are mistakes or attacks."""


@dataclass(frozen=True)
class TimeConditioning:
    """Time conditioning through an embedding."""

    width: int = 128
    """Width of the time embedding."""
    scale: float = 1000.0
    """Factor of t before its cosines and sines are taken."""

    def __post_init__(self) -> None:
        _require(self.width >= 1, f"the width of a time embedding must be at least 1; got {self.width}")
        _require(math.isfinite(self.scale), f"the scale of a time must be a finite number; got {self.scale}")


@dataclass(frozen=True)
class LocalInit:
    """The network starts by attending to neighbours, and so leaves the unigram plateau at once.

    It needs a `rope_theta` of about 100, whose frequencies distinguish near positions.
    """

    kernel_size: int = 7
    """Size of a depthwise convolution over the embeddings; odd."""
    offsets: tuple[int, ...] = (-1, 1, -2, 2)
    """Relative positions at which the attention heads start, one after another."""
    bias_scale: float = 8.0
    """What is added to the attention logits at those offsets."""

    def __post_init__(self) -> None:
        _require(self.kernel_size in range(1, 1 << 20, 2), f"kernel_size must be odd; got {self.kernel_size}")
        _require(bool(self.offsets), "a local start needs at least one offset to attend to")
        _require(
            max(map(abs, self.offsets)) <= _MAX_OFFSET,
            f"offsets are those of neighbours, at most {_MAX_OFFSET:,} away; got {self.offsets}",
        )
        _require(math.isfinite(self.bias_scale), f"bias_scale must be a finite number; got {self.bias_scale}")


@dataclass(frozen=True)
class LlamaBlock:
    """Blocks as in Llama: RMSNorm, SwiGLU, and no biases but perhaps those of queries, keys and values."""

    intermediate_size: int
    """Width of the gated MLP."""
    kv_heads: int | None = None
    """Number of key-value heads, each shared by several query heads; None for one per query head."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    head_dim: int | None = None
    """Width of a head, which may be another than width / heads, as in Qwen3; None for that."""
    rotary_fraction: float = 1.0
    """The share of a head, from its first dimension on, that is rotated by the position."""
    rotary_scaling: RotaryScaling | None = None
    """How rotary positions are stretched for longer texts, as in Llama 3; None: not at all."""
    experts: Experts | None = None
    """A mixture of experts in place of the MLP; None: every block has a plain one."""

    def __post_init__(self) -> None:
        _require(self.intermediate_size >= 1, f"intermediate_size must be at least 1; got {self.intermediate_size}")
        _require(0 < self.norm_eps < 1, f"norm_eps must be above 0 and below 1; got {self.norm_eps}")
        _require(self.kv_heads is None or self.kv_heads >= 1, f"kv_heads must be at least 1; got {self.kv_heads}")
        _require(
            self.head_dim is None or self.head_dim in range(2, _MAX_HEAD_DIM + 1, 2),
            f"head_dim must be an even number from 2 to {_MAX_HEAD_DIM:,}; got {self.head_dim}",
        )
        _require(0 < self.rotary_fraction <= 1, f"rotary_fraction must be above 0, up to 1; got {self.rotary_fraction}")


@dataclass(frozen=True)
class DiTConfig(BlockStackConfig):
    """Sizes and options of a DiT; `build(vocab)` makes it. The default is the paper's small model."""

    width: int = 768
    """Width of the hidden states."""
    depth: int = 12
    """Number of blocks."""
    heads: int = 12
    """Number of attention heads."""
    max_length: int = 1024
    """The longest sequence that the network takes."""
    dropout: float = 0.1
    """Dropout of the output of attention and MLP."""
    causal: bool = False
    """Whether a token attends only to itself and to the tokens before it."""
    tie_embeddings: bool = False
    """Whether the head shares the matrix of the embedding."""
    qk_norm: bool = False
    """Whether the queries and keys of each head are normalised (RMSNorm), as in Qwen3."""
    activation: str = "gelu"
    """Activation of the MLP: gelu or relu2."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    time_conditioning: TimeConditioning | None = None
    """Time conditioning; None for a network without it."""
    local_init: LocalInit | None = None
    """How the network starts by attending to neighbours; None for a plain start."""
    llama: LlamaBlock | None = None
    """Blocks as in Llama; None for those of DiT."""
    shift_logits: bool = False
    """Whether a token is predicted at the position before it, as in networks that began as autoregressive ones."""

    def __post_init__(self) -> None:
        _validate_sizes(self)
        _validate_combinations(self)
        _require(self.activation in ACTIVATIONS, f"activation must be gelu or relu2; got {self.activation!r}")
        _require(0 <= self.dropout < 1, f"dropout must be in [0, 1); got {self.dropout}")
        _require(0 < self.rope_theta < math.inf, f"rope_theta must be above 0 and finite; got {self.rope_theta}")

    def build(self, vocab: Vocab) -> DiT:
        return DiT(self, vocab)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return (self.llama and self.llama.head_dim) or self.width // self.heads

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        return round(self.head_dim * (self.llama.rotary_fraction if self.llama is not None else 1))

    def experts_of_layer(self, index: int) -> Experts | None:
        """The mixture of experts of a block; None: it has a plain MLP."""
        experts = None if self.llama is None else self.llama.experts
        return None if experts is None or index in experts.dense_layers else experts

    def one_block(self, index: int) -> DiTConfig:
        if self.llama is None or self.llama.experts is None:
            return super().one_block(index)
        dense = (0,) if self.experts_of_layer(index) is None else ()
        llama = replace(self.llama, experts=replace(self.llama.experts, dense_layers=dense))
        return replace(self, depth=1, llama=llama)

    def with_causal(self, causal: bool) -> DiTConfig:
        """A causal network has no local start, which attends to both sides."""
        return replace(self, causal=causal, local_init=None if causal else self.local_init)

    def build_norm(self) -> nn.Module:
        """The norm before attention, MLP and head; with adaLN its bias is the modulation's shift."""
        if self.llama is not None:
            return nn.RMSNorm(self.width, eps=self.llama.norm_eps)
        return nn.LayerNorm(self.width, bias=self.time_conditioning is None)

    def build_modulation(self, parts: int) -> nn.Linear | None:
        """A layer from the time embedding to shifts, scales and gates; None without time conditioning."""
        return None if self.time_conditioning is None else nn.Linear(self.time_conditioning.width, parts * self.width)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _validate_sizes(config: DiTConfig) -> None:
    limits = {"width": math.inf, "depth": math.inf, "heads": _MAX_HEADS, "max_length": _MAX_LENGTH}
    for name, most in limits.items():
        size = getattr(config, name)
        _require(size >= 1, f"{name} must be at least 1; got {size}")
        _require(size <= most, f"{name} must be at most {most:,}; got {size:,}")
    _require(
        config.width % (2 * config.heads) == 0 or bool(config.llama and config.llama.head_dim),
        f"width {config.width} must be an even multiple of the {config.heads} heads"
        " (rotary positions turn pairs of dimensions)",
    )
    _require(config.rotary_dim % 2 == 0, f"an even number of a head's dimensions is rotated; got {config.rotary_dim}")


def _validate_combinations(config: DiTConfig) -> None:
    llama = config.llama
    conflicts = {
        "a local start attends to both sides, which a causal network must not": config.causal and config.local_init,
        "a causal network predicts the next token already: leave out shift_logits": config.causal
        and config.shift_logits,
        "a local start needs heads that are rotated as a whole: leave out local_init": config.local_init
        and config.rotary_dim != config.head_dim,
        "blocks of Llama have their own activation: leave out activation": llama and config.activation != "gelu",
        f"{config.heads} heads cannot share {llama and llama.kv_heads} key-value heads evenly": llama
        and config.heads % (llama.kv_heads or config.heads),
    }
    for message, conflict in conflicts.items():
        _require(not conflict, message)


class DiT(Backbone):
    """The network of `DiTConfig`."""

    def __init__(self, config: DiTConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config = config
        local, timed = config.local_init, config.time_conditioning
        self.embedding = Embedding(vocab.size, config.width)
        self.local_conv = None if local is None else DepthwiseConv(config.width, local.kernel_size)
        scaling = None if config.llama is None else config.llama.rotary_scaling
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta, scaling)
        self.time_embedding = None if timed is None else TimeEmbedding(timed.width, timed.scale)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.depth))
        self.norm = config.build_norm()
        self.modulation = config.build_modulation(2)
        self.lm_head = Linear(config.width, vocab.size, bias=config.llama is None)
        self._init_weights()
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.config.max_length,
            self.config.causal,
            self.config.time_conditioning is not None,
            self.config.shift_logits,
            supports_stages=True,
            supports_documents=True,
            supports_cache=True,
            parses_special_tokens=self.config.llama is not None,
        )

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def describe(self) -> dict[str, Any]:
        config = self.config
        experts = config.llama and config.llama.experts
        chosen = f", and {experts.per_token} of {experts.count} experts for each token" if experts else ""
        return {"network": f"{config.depth} layers of width {config.width} with {config.heads} heads{chosen}"}

    def new_cache(self) -> KVCache:
        return KVCache()

    def aux_loss(self) -> Tensor | None:
        """The mean over blocks of what their mixtures of experts add."""
        mixtures = [block.mlp for block in self.layers if isinstance(block.mlp, MixtureOfExperts)]
        losses = [mixture.aux_loss for mixture in mixtures if mixture.aux_loss is not None]
        return torch.stack(losses).mean() if losses else None

    def embed(self, tokens: Tokens) -> Tensor:
        embeddings: Tensor = self.embedding(tokens)
        return embeddings

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        queries, order = self._resolve_queries(h, positions)
        packed, left_padded = self._pack(h, queries, context)
        attn = attention_layout(
            h.shape[1], h.device, causal=self.config.causal, context=context, left_padded=left_padded
        )
        if queries is not None and self.config.shift_logits:
            queries, order = _shift(queries, order, attn, context)
        x = self._hidden_states(h, t, context, attn, packed, queries)
        if order is not None:
            x = x[order]
        return x.view(*h.shape[:2], -1) if positions is None else x

    def features(self, h: Tensor, t: Times, context: Context = Context()) -> Tensor:
        packed, left_padded = self._pack(h, None, context)
        attn = attention_layout(
            h.shape[1], h.device, causal=self.config.causal, context=context, left_padded=left_padded
        )
        return self._hidden_states(h, t, context, attn, packed, None)

    def _hidden_states(
        self,
        h: Tensor,
        t: Times,
        context: Context,
        attn: AttentionLayout,
        packed: PackedTokens | None,
        queries: Queries | None,
    ) -> Tensor:
        """What the head reads: [B, L, width] or, at the queries, [N, width]."""
        time_emb = None if self.time_embedding is None else self.time_embedding(t)
        x = self._add_neighbours(h, context, attn)
        x = self._run_blocks(x, time_emb, context, attn, packed, queries)
        return self._modulated_norm(x, time_emb, queries)

    def _resolve_queries(self, h: Tensor, positions: Positions | None) -> tuple[Queries | None, Tensor | None]:
        """The queried positions, and the order of the output; None for all positions, or for their order."""
        if positions is None and not self.config.shift_logits:
            return None, None
        if positions is None:
            return Queries.everywhere(h.shape[:2], h.device), None
        return Queries.resolve(positions, h.shape[:2])

    def _pack(self, h: Tensor, queries: Queries | None, context: Context) -> tuple[PackedTokens | None, bool | None]:
        """The tokens that blocks compute if there is padding, and whether any padding is on the left."""
        padded = None if context.cache is None else context.cache.valid_on_host
        if padded is not None:  # the shorter calls of a merged one
            return PackedTokens.if_sparse(
                torch.from_numpy(padded).to(h.device), Queries.from_host(padded, h.device)
            ), None
        if context.valid is None or context.stages is not None or context.cache is not None:
            return None, None
        valid = context.valid[:, : h.shape[1]]
        computed = valid if queries is None else valid | queries.mask()
        known, queried = context.valid_on_host, np.False_ if queries is None else queries.on_host
        if known is None or queried is None:
            indices = Queries.from_mask(computed, valid[:, 0].all())
            return PackedTokens.if_sparse(computed, indices), not indices.facts[0]
        indices = Queries.from_host(known[:, : h.shape[1]] | queried, h.device)
        return PackedTokens.if_sparse(computed, indices), not known[:, 0].all()

    def _add_neighbours(self, h: Tensor, context: Context, attn: AttentionLayout) -> Tensor:
        """h, plus a convolution over neighbouring positions if the network has one."""
        if self.local_conv is None:
            return h
        cache = kv_view(context)
        if context.stages is None and cache is None:
            neighbours: Tensor = self.local_conv(h, context.valid, context.document_ids)
        else:
            neighbours = self.local_conv.gathered(h if cache is None else cache.update_embeddings(h), attn)
        return h + neighbours

    def _run_blocks(
        self,
        x: Tensor,
        time_emb: Tensor | None,
        context: Context,
        attn: AttentionLayout,
        packed: PackedTokens | None,
        queries: Queries | None,
    ) -> Tensor:
        """The output of the last block: [B, L, width] or, at the queries, [N, width]."""
        cos_sin, cache = self.rotary.cos_sin(attn.position_ids, x.dtype), kv_view(context)
        *first, last = self.layers
        packed = packed if first else None
        mask = attn.mask
        # Beside a cache, whose length changes from call to call, it would be compiled again and again.
        if context.stages is not None and cache is None and mask is not None and x.device.type in FLEX_DEVICES:
            mask = flex_block_mask(mask)
        x = x if packed is None else packed.pack(x)
        for index, block in enumerate(first):
            x = self._run_block(block, x, time_emb, cos_sin, mask, cache, index, None, packed)
        x = x if packed is None else packed.unpack(x)
        # Of the last block only the queried outputs are used.
        selected = None if queries is None or self.config.causal else SelectedPositions.if_sparse(queries)
        x = self._run_block(last, x, time_emb, cos_sin, attn.mask, cache, len(first), selected)
        return x if queries is None or selected is not None else x[tuple(queries)]

    def _run_block(self, block: nn.Module, *inputs: object) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return out
        with recompute_scope():
            out = block(*inputs)
            return out

    def _modulated_norm(self, h: Tensor, time_emb: Tensor | None, queries: Queries | None) -> Tensor:
        x: Tensor = self.norm(h)
        if self.modulation is None or time_emb is None:
            return x
        if queries is not None:
            time_emb = time_emb.expand(*queries.shape, -1)[tuple(queries)]
        shift, scale = self.modulation(time_emb).chunk(2, dim=-1)
        modulated: Tensor = x * (1 + scale) + shift
        return modulated

    def _init_weights(self) -> None:
        """Blocks start small, modulation and an untied head at zero: the first prediction is then uniform."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.layers:
            assert isinstance(block, Block)
            block.init_weights(self.config, self.rotary)
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
        if not self.config.tie_embeddings:
            nn.init.zeros_(self.lm_head.weight)


def _shift(
    queries: Queries, order: Tensor | None, attn: AttentionLayout, context: Context
) -> tuple[Queries, Tensor | None]:
    """The positions before the queried ones, each once, and the order of the output.

    The first two tokens of a text are both predicted at its first position.
    """
    shifted, moved = Queries.resolve(
        (queries[0], attn.shifted(queries)), queries.shape, on_host=attn.shifted_on_host(queries, context)
    )
    return shifted, moved if moved is None or order is None else moved[order]
