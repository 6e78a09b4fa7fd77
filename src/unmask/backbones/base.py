"""The seam of networks: tokens to embeddings, embeddings to hidden states, hidden states to logits.

Everything else asks a network only through `Backbone`: FSDP, torch.compile, gradient checkpointing, Muon
and LoRA take its `blocks()` one by one; cards and reports show its `describe()`.
"""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unmask.context import Cache, Context
from unmask.ops.linear import linear
from unmask.types import Positions, Times, Tokens, Vocab


@dataclass(frozen=True)
class Capabilities:
    """What a network can do."""

    max_length: int | None = None
    """The longest sequence that it takes; None if there is no limit."""
    causal: bool = False
    """Whether a token attends only to itself and to the tokens before it."""
    time_conditioned: bool = False
    """Whether the hidden states depend on t."""
    shift_logits: bool = False
    """Whether the logits of a token are read at the position before it."""
    supports_stages: bool = False
    """Whether `encode` takes attention stages, which block diffusion needs."""
    supports_documents: bool = False
    """Whether `encode` takes document ids."""
    supports_cache: bool = False
    """Whether `encode` takes a cache, and `new_cache` makes one."""
    supports_segments: bool = False
    """Whether the network tells the two texts of a pair apart by segment ids."""
    parses_special_tokens: bool = False
    """Whether its texts spell special tokens, such as [CLS] or those of a chat, as those of published networks do."""


class _BackboneMeta(ABCMeta):
    """Refuses a network without a head as soon as it is built; ABCMeta refuses one without a method."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        backbone = super().__call__(*args, **kwargs)
        if not isinstance(getattr(backbone, "lm_head", None), nn.Module):
            raise TypeError(f"{cls.__name__} must set self.lm_head, a linear layer from hidden states to logits")
        return backbone


class Backbone(nn.Module, ABC, metaclass=_BackboneMeta):
    """A network: logits = lm_head(encode(embed(tokens), t, positions, context))."""

    lm_head: nn.Linear
    """Logits [..., V] of hidden states [..., width]."""
    future_visibility: float | None = None
    """The fraction of later tokens that a network trained as a causal one attends to; None for other networks."""
    gradient_checkpointing: bool = False
    """Whether blocks save only their inputs for the backward pass, and are computed again there."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the network can do."""

    @abstractmethod
    def embed(self, tokens: Tokens) -> Tensor:
        """The embeddings [B, L, width] of tokens [B, L], as `encode` takes them."""

    @abstractmethod
    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        """Hidden states of embeddings h: [N, width] at the queried `positions`, or [B, L, width] without them.

        `context.valid` and `context.document_ids` are those of the whole text, of which a call with a cache
        reads a part.
        """

    def features(self, h: Tensor, t: Times, context: Context = Context()) -> Tensor:
        """Hidden states [B, L, width] that describe the tokens at their own positions: what a classifier reads.

        They are those of `encode`, unless that predicts a token at another position (`shift_logits`) or has layers
        that only predictions need, as the head of a BERT has: such a network overrides this.
        """
        if self.capabilities.shift_logits:
            raise ValueError(f"{type(self).__name__} predicts tokens at other positions, and must define features()")
        return self.encode(h, t, None, context)

    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks, in order: they are sharded, compiled and checkpointed one by one."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What cards and reports say about the network: a few short names with values."""

    def new_cache(self) -> Cache:
        """An empty cache, of the kind that `encode` takes."""
        raise ValueError(f"{type(self).__name__} has no cache: sample without one")

    def undecayed_parameters(self) -> Sequence[nn.Parameter]:
        """Matrices that weight decay and Muon leave alone, as they do vectors."""
        return ()

    def aux_loss(self) -> Tensor | None:
        """A scalar of the last call that is added to the loss per token, such as a balance of experts, already
        multiplied by its coefficient; None: nothing. Whether there is one is the same in every call."""
        return None

    @torch.no_grad()
    def init_output_bias(self, logits: Float[Tensor, " V"]) -> None:
        """Start with these logits [V] for every hidden state, such as log frequencies of tokens."""
        if self.lm_head.bias is None:
            raise ValueError("the head has no bias to start at token frequencies; set unigram_bias_init=false")
        self.lm_head.bias.copy_(logits)

    def compute_logits(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows V"]:
        """Logits [..., V] of hidden states [..., width]."""
        if self.has_plain_head:
            return linear(hidden, self.lm_head.weight, self.lm_head.bias, float32_sums=True)
        logits: Tensor = self.lm_head(hidden)
        return logits

    @property
    def has_plain_head(self) -> bool:
        """Whether the head is hidden weight^T + bias and nothing else, such as an adapter around it."""
        return isinstance(self.lm_head, nn.Linear)

    def require(self, context: Context) -> None:
        """Refuse a context that the network does not support."""
        can = self.capabilities
        given = (
            (context.stages, can.supports_stages, "attention stages, so it cannot read block by block"),
            (context.document_ids, can.supports_documents, "document ids; train with one document in a row"),
            (context.cache, can.supports_cache, "a cache; sample without one"),
            (context.segment_ids, can.supports_segments, "segment ids; separate the texts of a pair by a token"),
        )
        for value, supported, what in given:
            if value is not None and not supported:
                raise ValueError(f"{type(self).__name__} does not support {what}")


class BackboneConfig(ABC):
    """The settings of a network, a frozen dataclass that model folders store; `build` makes the network."""

    max_length: int | None
    """The longest sequence that the network takes; None if there is no limit."""
    causal: bool = False
    """Whether a token attends only to itself and to the tokens before it."""
    needs_weights: ClassVar[bool] = False
    """Whether such a network is only loaded with its weights, and never trained from random ones."""

    @abstractmethod
    def build(self, vocab: Vocab) -> Backbone:
        """A network with fresh weights."""

    def with_causal(self, causal: bool) -> Self:
        """The same with causal attention, or without; refused by networks that are only one of the two."""
        if causal != self.causal:
            raise ValueError(
                f"{type(self).__name__} has causal={self.causal}, and this objective needs causal={causal}"
            )
        return self


class BlockStackConfig(BackboneConfig):
    """The settings of a network of blocks, all or most of them alike, which it calls `layers`."""

    width: int
    """Width of the hidden states."""
    depth: int
    """Number of blocks."""

    def one_block(self, index: int) -> Self:
        """A network whose only block is that of this index; equal for blocks that are alike."""
        return cast(Self, replace(cast(Any, self), depth=1))


def undecayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The matrices of all backbones inside a module that weight decay and Muon leave alone."""
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    return {parameter for backbone in backbones for parameter in backbone.undecayed_parameters()}


def network_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of all backbones inside a module."""
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    return [block for backbone in backbones for block in backbone.blocks()]
