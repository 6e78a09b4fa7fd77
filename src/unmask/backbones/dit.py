"""DiT: a pre-norm transformer with rotary positions, conditioned on time only if asked to be.

With time conditioning each block is modulated by the time's embedding (adaLN: shift, scale and gate);
without it no such parameters exist, and it is a plain transformer. Its blocks may be Llama's, as in LLaDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.backbones.again import again, sparing
from unmask.backbones.base import Backbone
from unmask.backbones.layers import (
    GELU,
    Angles,
    Attention,
    Gated,
    Neighbours,
    Rotary,
    SquaredReLU,
    TimeEmbedding,
    TwoLayers,
)
from unmask.backbones.masks import FLEX, Beside, Order, sight, sparse
from unmask.backbones.products import for_products
from unmask.backbones.ragged import Asked, Packed
from unmask.types import Rows, Times, Tokens, Vocab

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": GELU,
    "relu2": SquaredReLU,
}
"""What may stand between a block's two linear layers."""

FARTHEST, MOST_HEADS, LONGEST = 1_000, 1_024, 1 << 24
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
class LocalStart:
    """The network begins by looking at neighbours, and so leaves the unigram plateau at once.

    A convolution of `taps` over the embeddings, and biases of queries and keys that start the heads in
    turn at these `offsets`, with `strength` more in the attention logits. Wants a `rotary_base` of
    about 100, whose waves tell near positions apart.
    """

    taps: int = 7
    offsets: tuple[int, ...] = (-1, 1, -2, 2)
    strength: float = 8.0

    def __post_init__(self) -> None:
        if self.taps < 1 or self.taps % 2 == 0:
            raise ValueError(f"taps must be odd, so that they have a middle; got {self.taps}")
        if not self.offsets:
            raise ValueError("a local start needs at least one offset to look at")
        if max(map(abs, self.offsets)) > FARTHEST:
            raise ValueError(
                f"offsets are those of neighbours, at most {FARTHEST:,} away; got {self.offsets}"
            )
        if not math.isfinite(self.strength):
            raise ValueError(f"strength must be a finite number; got {self.strength}")


@dataclass(frozen=True)
class Llama:
    """Blocks as in Llama: RMSNorm, a gated network of width `hidden` (SwiGLU), hardly a bias.

    Each of `kv_heads` keys and values serves several heads; None for one each. `bias`: queries, keys and
    values have one, as in Qwen2.
    """

    hidden: int
    kv_heads: int | None = None
    eps: float = 1e-5
    bias: bool = False

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"the width of a gated network must be at least 1; got {self.hidden}")
        if not 0 < self.eps < 1:
            raise ValueError(
                f"eps keeps a norm from dividing by 0: it must be above 0 and below 1; got {self.eps}"
            )
        if self.kv_heads is not None and self.kv_heads < 1:
            raise ValueError(f"kv_heads must be at least 1; got {self.kv_heads}")


@dataclass(frozen=True)
class DiTConfig:
    """Sizes and options of a DiT; `build(vocab)` makes it. The default is the paper's small model.

    `shifted`: a token is predicted where the one before it is read, as in networks that began as
    autoregressive ones.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    length: int = 1024
    dropout: float = 0.1
    causal: bool = False
    tied: bool = False
    qk_norm: bool = False
    activation: str = "gelu"
    rotary_base: float = 10_000.0
    time: TimeConditioning | None = None
    local: LocalStart | None = None
    llama: Llama | None = None
    shifted: bool = False

    def __post_init__(self) -> None:
        if self.causal and self.local is not None:
            raise ValueError("a local start looks to both sides, which a causal network must not")
        if self.causal and self.shifted:
            raise ValueError("a causal network reads its text one place late already: leave out shifted")
        if self.llama is not None and self.activation != "gelu":
            raise ValueError("blocks of Llama have an activation of their own: leave out activation")
        if self.llama is not None and self.heads % (self.llama.kv_heads or self.heads):
            raise ValueError(f"{self.heads} heads cannot share {self.llama.kv_heads} keys and values evenly")
        for name in ("width", "depth", "heads", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name, most in (("heads", MOST_HEADS), ("length", LONGEST)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}; got {getattr(self, name):,}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be an even multiple of the {self.heads} heads"
                " (rotary positions turn pairs of dimensions)"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be {' or '.join(ACTIVATIONS)}; got {self.activation!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if not 0 < self.rotary_base < math.inf:
            raise ValueError(f"rotary_base must be above 0 and finite; got {self.rotary_base}")

    def norm(self) -> nn.Module:
        """A norm of a block's inputs; a shift by adaLN takes the place of its own bias."""
        if self.llama is not None:
            return nn.RMSNorm(self.width, eps=self.llama.eps)
        return nn.LayerNorm(self.width, bias=self.time is None)

    def build(self, vocab: Vocab) -> DiT:
        """A network with fresh weights."""
        return DiT(self, vocab)


class Block(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)); at the `asked` positions, if given.

    x is [B, L, width], or [T, width] if `packed`.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, llama = config.width, config.llama
        self.norm1 = config.norm()
        self.attention = Attention(
            width,
            config.heads,
            kv_heads=None if llama is None else llama.kv_heads,
            bias=llama is not None and llama.bias,
            qk_norm=config.qk_norm,
            causal=config.causal,
            biased=config.local is not None,
        )
        self.norm2 = config.norm()
        hidden = 4 * width if llama is None else llama.hidden
        self.mlp = TwoLayers(
            nn.Linear(width, hidden if llama is None else 2 * hidden, bias=llama is None),
            ACTIVATIONS[config.activation]() if llama is None else Gated(),
            nn.Linear(hidden, width, bias=llama is None),
        )
        self.dropout = nn.Dropout(config.dropout)
        self.modulation = None if config.time is None else nn.Linear(config.time.width, 6 * width)

    def forward(
        self,
        x: Tensor,
        time: Tensor | None,
        angles: Angles,
        seen: Any = None,
        beside: Beside | None = None,
        layer: int = 0,
        asked: Asked | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        attend, mlp, drop = self.attention, self.mlp, self.dropout
        if self.modulation is None or time is None:
            mixed = attend(again(_normed, self.norm1, x), angles, seen, beside, layer, asked, packed)
            x = (x if asked is None else asked.of(x)) + drop(mixed)
            x = x + drop(mlp(again(_normed, self.norm2, x)))
            return x
        parts = self.modulation(time).chunk(6, dim=-1)
        shift, scale, *rest = parts if packed is None else map(packed.of, parts)
        inputs = again(_modulated, self.norm1, x, shift, scale)
        mixed = attend(inputs, angles, seen, beside, layer, asked, packed)
        if asked is not None:
            x, *rest = (asked.of(each) for each in (x, *rest))
        gate1, shift, scale, gate2 = rest
        x = x + gate1 * drop(mixed)
        x = x + gate2 * drop(mlp(again(_modulated, self.norm2, x, shift, scale)))
        return x


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    return for_products(norm(x))


def _modulated(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return for_products(again(norm, x) * (1 + scale) + shift)


class DiT(Backbone):
    """The network of `DiTConfig`."""

    def __init__(self, config: DiTConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config = config
        self.max_length, self.causal, self.timed = config.length, config.causal, config.time is not None
        self.shifted = config.shifted
        self.embedding = nn.Embedding(vocab.size, config.width)
        self.neighbours = None if config.local is None else Neighbours(config.width, config.local.taps)
        self.rotary = Rotary(config.width // config.heads, config.rotary_base)
        self.time = None if config.time is None else TimeEmbedding(config.time.width, config.time.scale)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = config.norm()
        self.modulation = None if config.time is None else nn.Linear(config.time.width, 2 * config.width)
        self.output = nn.Linear(config.width, vocab.size, bias=config.llama is None)
        self._initialise()
        if config.tied:
            self.output.weight = self.embedding.weight

    def encode(
        self,
        tokens: Tokens,
        t: Times,
        rows: Rows | None = None,
        *,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
        order: Order | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        told: dict[str, Any] = {"valid": valid, "documents": documents, "order": order, "beside": beside}
        if isinstance(rows, tuple):  # in any order, and some perhaps twice
            flags = torch.zeros_like(tokens, dtype=torch.bool)
            flags[rows] = True
            number = (flags.flatten().cumsum(0) - 1).view(flags.shape)[rows]
            return self.encode(tokens, t, flags, **told)[number]
        if self.shifted and rows is None:
            everywhere = torch.ones_like(tokens, dtype=torch.bool)
            return self.encode(tokens, t, everywhere, **told).view(*tokens.shape, -1)
        view = sight(tokens.shape[1], tokens.device, causal=self.causal, **told)
        x: Tensor = self.embedding(tokens)
        if self.neighbours is not None:
            if order is None and beside is None:
                x = x + self.neighbours(x, valid, documents)
            else:
                x = x + self.neighbours.among(x if beside is None else beside.embedded(x), view)
        taken: Tensor | None = None
        if self.shifted and rows is not None:
            rows, taken = view.before(rows)
        time = None if self.time is None else self.time(t)
        angles, seen = self.rotary.angles(view.position, x.dtype), view.seen
        whole = sparse(seen) if order is not None and seen is not None and x.device.type in FLEX else seen
        *first, last = self.blocks
        packed = None
        if first and view.valid is not None and order is None and beside is None:
            packed = Packed.where(view.valid if rows is None else view.valid | rows)
        x = x if packed is None else packed.of(x)
        for layer, block in enumerate(first):
            x = self._through(block, x, time, angles, whole, beside, layer, None, packed)
        x = x if packed is None else packed.spread(x)
        # Nobody looks at the last layer's output but who asked for it.
        asked = None
        if rows is not None and not self.causal and not bool(rows.all()):
            asked = Asked(rows)
        x = self._through(last, x, time, angles, seen, beside, len(first), asked)
        if rows is not None and asked is None:
            x = x[rows]
        x = self.norm(x)
        if self.modulation is not None and time is not None:
            if rows is not None:
                time = time.expand(*tokens.shape, -1)[rows]
            shift, scale = self.modulation(time).chunk(2, dim=-1)
            x = x * (1 + scale) + shift
        return x if taken is None else x[taken]

    def matrices(self) -> Iterator[Tensor]:
        yield from super().matrices()
        for block in self.blocks:
            assert isinstance(block, Block)
            for module in (*block.attention.modules(), *block.mlp.modules()):
                if isinstance(module, nn.Linear):
                    yield module.weight

    def _through(self, block: nn.Module, *inputs: object) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return out
        with sparing():
            out = block(*inputs)
            return out

    @torch.no_grad()
    def expect(self, logits: Tensor) -> None:
        if self.output.bias is None:
            raise ValueError("a head without a bias cannot begin with frequencies; set unigram_start=false")
        self.output.bias.copy_(logits)

    def _initialise(self) -> None:
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
            if self.config.local is not None:
                block.attention.look_at(self.config.local.offsets, self.config.local.strength, self.rotary)
            if block.modulation is not None:
                # Gates start at one, so that blocks learn from the first step as a plain transformer's do.
                nn.init.zeros_(block.modulation.weight)
                with torch.no_grad():
                    block.modulation.bias.view(6, -1)[[2, 5]] = 1
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
        if not self.config.tied:
            nn.init.zeros_(self.output.weight)
