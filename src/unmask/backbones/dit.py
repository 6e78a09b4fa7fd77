"""DiT: a pre-norm transformer with rotary positions, conditioned on time only if asked to be.

With time conditioning each block is modulated by the time's embedding (adaLN: shift, scale and gate);
without it no such parameters exist, and it is a plain transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.backbones.base import Backbone
from unmask.backbones.layers import (
    Angles,
    Asked,
    Attention,
    KVCache,
    Neighbours,
    Rotary,
    SquaredReLU,
    TimeEmbedding,
    attention_mask,
)
from unmask.types import Rows, Times, Tokens, Vocab

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": partial(nn.GELU, approximate="tanh"),
    "relu2": SquaredReLU,
}
"""What may stand between a block's two linear layers."""


@dataclass(frozen=True)
class TimeConditioning:
    """The network is told the time, `scale` times over, through an embedding of this width."""

    width: int = 128
    scale: float = 1000.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"the width of a time embedding must be at least 1; got {self.width}")


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


@dataclass(frozen=True)
class DiTConfig:
    """Sizes and options of a DiT; `build(vocab)` makes it. The default is the paper's small model."""

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

    def __post_init__(self) -> None:
        if self.causal and self.local is not None:
            raise ValueError("a local start looks to both sides, which a causal network must not")
        for name in ("width", "depth", "heads", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} must be an even multiple of the {self.heads} heads"
                " (rotary positions turn pairs of dimensions)"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be {' or '.join(ACTIVATIONS)}; got {self.activation!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if not self.rotary_base > 0:
            raise ValueError(f"rotary_base must be above 0; got {self.rotary_base}")

    def build(self, vocab: Vocab) -> DiT:
        """A network with fresh weights."""
        return DiT(self, vocab)


class Block(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)); at the `asked` positions, if given."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        # A shift by adaLN takes the place of the norms' own bias.
        self.norm1 = nn.LayerNorm(width, bias=config.time is None)
        self.attention = Attention(
            width, config.heads, config.qk_norm, config.causal, biased=config.local is not None
        )
        self.norm2 = nn.LayerNorm(width, bias=config.time is None)
        between = ACTIVATIONS[config.activation]()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), between, nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(config.dropout)
        self.modulation = None if config.time is None else nn.Linear(config.time.width, 6 * width)

    def forward(
        self,
        x: Tensor,
        time: Tensor | None,
        angles: Angles,
        seen: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        asked: Asked | None = None,
    ) -> Tensor:
        attend, mlp, drop = self.attention, self.mlp, self.dropout
        if self.modulation is None or time is None:
            mixed = attend(self.norm1(x), angles, seen, cache, layer, asked)
            x = (x if asked is None else asked.of(x)) + drop(mixed)
            x = x + drop(mlp(self.norm2(x)))
            return x
        shift, scale, *rest = self.modulation(time).chunk(6, dim=-1)
        mixed = attend(self.norm1(x) * (1 + scale) + shift, angles, seen, cache, layer, asked)
        if asked is not None:
            x, *rest = (asked.of(each) for each in (x, *rest))
        gate1, shift, scale, gate2 = rest
        x = x + gate1 * drop(mixed)
        x = x + gate2 * drop(mlp(self.norm2(x) * (1 + scale) + shift))
        return x


class DiT(Backbone):
    """The network of `DiTConfig`."""

    def __init__(self, config: DiTConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config = config
        self.max_length, self.causal, self.timed = config.length, config.causal, config.time is not None
        self.embedding = nn.Embedding(vocab.size, config.width)
        self.neighbours = None if config.local is None else Neighbours(config.width, config.local.taps)
        self.rotary = Rotary(config.width // config.heads, config.rotary_base)
        self.time = None if config.time is None else TimeEmbedding(config.time.width, config.time.scale)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, bias=config.time is None)
        self.modulation = None if config.time is None else nn.Linear(config.time.width, 2 * config.width)
        self.output = nn.Linear(config.width, vocab.size)
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
        cache: KVCache | None = None,
    ) -> Tensor:
        seen = attention_mask(valid, documents)
        if cache is not None and (not self.causal or seen is not None):
            raise ValueError("a key-value cache needs a causal network and rows without padding or documents")
        start = 0 if cache is None else cache.length
        x: Tensor = self.embedding(tokens)
        if self.neighbours is not None:
            x = x + self.neighbours(x, valid, documents)
        time = None if self.time is None else self.time(t)
        angles = self.rotary.angles(start, tokens.shape[1], x.dtype)
        *first, last = self.blocks
        for layer, block in enumerate(first):
            x = self._through(block, x, time, angles, seen, cache, layer)
        # Nobody looks at the last layer's output but who asked for it.
        asked = Asked(rows) if isinstance(rows, Tensor) and not self.causal else None
        x = self._through(last, x, time, angles, seen, cache, len(first), asked)
        if rows is not None and asked is None:
            x = x[rows]
        x = self.norm(x)
        if self.modulation is not None and time is not None:
            if rows is not None:
                time = time.expand(*tokens.shape, -1)[rows]
            shift, scale = self.modulation(time).chunk(2, dim=-1)
            x = x * (1 + scale) + shift
        return x

    def _through(self, block: nn.Module, *inputs: object) -> Tensor:
        recompute = self.recompute and torch.is_grad_enabled()
        out: Tensor = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
        return out

    @torch.no_grad()
    def expect(self, logits: Tensor) -> None:
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
