"""MosaicBERT: a post-norm transformer with ALiBi instead of positions and a gated MLP, the MDLM paper's BERT.

    x = LN(word[id] + type)
    per block:  x = LN(x + W_o attention(x)),  x = LN(x + W (gelu(g) * u))  with  g, u = halves of G x
    head:       LN(gelu(W x + b)) E^T + b      (E: word embeddings, tied)

Attention logits have ALiBi's -slope_h |i - j| added, so texts of any length can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unmask.backbones._embedding import Embedding
from unmask.backbones.attention_mask import AttentionLayout, attention_layout
from unmask.backbones.base import Backbone, BlockStackConfig, Capabilities
from unmask.backbones.cache import KVCache, KVCacheView, kv_view
from unmask.context import Context
from unmask.ops.cpu_attention import attention
from unmask.ops.linear import Linear
from unmask.types import Positions, Times, Tokens, Vocab

_MAX_HEADS = 1_024
"""No network needs more; larger numbers are mistakes or attacks."""


@dataclass(frozen=True)
class MosaicBERTConfig(BlockStackConfig):
    """Sizes and options of a MosaicBERT; `build(vocab)` makes it. The default is the base model."""

    width: int = 768
    """Width of the hidden states."""
    depth: int = 12
    """Number of blocks."""
    heads: int = 12
    """Number of attention heads."""
    intermediate_size: int = 3072
    """Width of the gated MLP."""
    max_length: int | None = 512
    """The longest sequence; None for no limit, as ALiBi needs none."""
    dropout: float = 0.1
    """Dropout of the embeddings, of the attention's output and inside the MLP."""
    token_types: int = 2
    """Number of token types, by which pairs of texts are told apart; texts alone are of type 0."""
    norm_eps: float = 1e-12
    """Added to the variance in LayerNorm."""
    causal: bool = False
    """Whether a token attends only to itself and to the tokens before it."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "intermediate_size", "token_types"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {self.max_length}")
        if self.width % self.heads or self.heads > _MAX_HEADS:
            raise ValueError(f"width must be a multiple of heads, at most {_MAX_HEADS}; got {self.width}, {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be above 0 and below 1; got {self.norm_eps}")

    def build(self, vocab: Vocab) -> MosaicBERT:
        return MosaicBERT(self, vocab)

    def with_causal(self, causal: bool) -> MosaicBERTConfig:
        return replace(self, causal=causal)

    def build_norm(self) -> nn.LayerNorm:
        """A norm of the hidden states."""
        return nn.LayerNorm(self.width, eps=self.norm_eps)


class MosaicBERT(Backbone):
    """The network of `MosaicBERTConfig`."""

    def __init__(self, config: MosaicBERTConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(vocab.size, config.width)
        self.token_type_embedding = nn.Embedding(config.token_types, config.width)
        self.embedding_norm = config.build_norm()
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.head_transform = Linear(config.width, config.width)
        self.head_norm = config.build_norm()
        self.lm_head = Linear(config.width, vocab.size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.lm_head.weight = self.embedding.weight

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            self.config.max_length,
            self.config.causal,
            supports_stages=True,
            supports_documents=True,
            supports_cache=True,
            supports_segments=self.config.token_types > 1,
        )

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def describe(self) -> dict[str, Any]:
        config = self.config
        return {"network": f"MosaicBERT, {config.depth} layers of width {config.width} with {config.heads} heads"}

    def new_cache(self) -> KVCache:
        return KVCache()

    def embed(self, tokens: Tokens) -> Tensor:
        embeddings: Tensor = self.embedding(tokens)
        return embeddings

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        hidden = self.features(h, t, context)
        hidden = hidden if positions is None else hidden[positions]
        transformed: Tensor = self.head_norm(F.gelu(self.head_transform(hidden)))
        return transformed

    def features(self, h: Tensor, t: Times, context: Context = Context()) -> Float[Tensor, "B L width"]:
        """The output of the last block; the head reads a transform of it."""
        layout = attention_layout(h.shape[1], h.device, causal=self.config.causal, context=context)
        bias, cache = self._attention_bias(layout), kv_view(context)
        x: Tensor = self.dropout(self.embedding_norm(h + self._token_types(context)))
        for index, block in enumerate(self.layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, bias, cache, index, use_reentrant=False)
            else:
                x = block(x, bias, cache, index)
        return x

    def _token_types(self, context: Context) -> Float[Tensor, "*B_n width"]:
        """The embeddings of the token types, which are the segments of a pair of texts; 0 without them."""
        if context.segment_ids is None:
            return self.token_type_embedding.weight[0]
        types: Tensor = self.token_type_embedding(context.segment_ids)
        return types

    def _attention_bias(self, layout: AttentionLayout) -> Float[Tensor, "B heads n K"]:
        """-slope |i - j| of the positions of queries and keys; -inf where a query must not attend to a key."""
        offset = (layout.key_positions[:, None] - layout.query_positions[..., None])[:, None]
        slopes = torch.tensor(_alibi_slopes(self.config.heads), device=offset.device)
        bias = -slopes[:, None, None] * offset.abs()
        if layout.mask is not None:
            bias = bias.masked_fill(~layout.mask, -torch.inf)
        return bias.masked_fill(offset > 0, -torch.inf) if self.config.causal and layout.mask is None else bias


class _Block(nn.Module):
    """x = LN(x + attention(x)), then x = LN(x + mlp(x))."""

    def __init__(self, config: MosaicBERTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)
        self.attention_norm = config.build_norm()
        self.gate_up = Linear(config.width, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, config.width)
        self.mlp_norm = config.build_norm()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, cache: KVCacheView | None = None, layer_index: int = 0) -> Tensor:
        """x [B, n, width]; bias [B or 1, heads, n, K] is added to the attention logits."""
        q, k, v = torch.unflatten(self.qkv(x), -1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(layer_index, k, v)
        attended = attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dropout(self.out(attended)))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.mlp_norm(x + self.down(self.dropout(F.gelu(gate) * up)))
        return out


def _alibi_slopes(heads: int) -> list[float]:
    """2^(-8 (i + 1)/n) for a power of two; otherwise those of the power of two below, and of twice as many heads every
    second one, as many as are missing."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + _alibi_slopes(2 * power)[0::2][: heads - power]
