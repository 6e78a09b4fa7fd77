"""What a network must offer: hidden states of all positions, and a head for the asked ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor, nn

from unmask.context import Cache, Context
from unmask.ops.linear import linear
from unmask.types import Positions, Times, Tokens, Vocab


class Backbone(nn.Module):
    """`encode` reads a whole sequence once; `head` is then called on the rows that matter only."""

    max_length: int | None
    """The longest sequence it takes; None where there is no limit."""
    causal: bool
    """Whether a position sees only itself and those before it."""
    time_conditioned: bool
    """Whether the hidden states depend on t."""
    shift_logits: bool = False
    """Whether a token is predicted where the one before it is read."""
    future_visibility: float | None = None
    """Of a network that was born causal, the share of what follows that it looks at; others have none."""
    lm_head: nn.Linear
    """The head: logits from hidden states."""
    gradient_checkpointing: bool = False
    """Whether blocks keep nothing but their inputs for the backward pass, and are computed again there."""

    @abstractmethod
    def encode(
        self,
        tokens: Tokens,
        t: Times,
        positions: Positions | None = None,
        context: Context = Context(),
    ) -> Tensor:
        """Hidden states [B, L, width] or, if `rows` are asked, of these [N, width].

        `valid` is False on padding, which nobody looks at; places with different numbers in `documents` do
        not look at each other. In some `order` a position sees its own stage and what lasts of earlier ones.
        `beside` a cache, tokens see what it holds. `valid` and `documents` [B, places] are by place: of the
        whole text, of which the tokens may be a part.
        """

    @abstractmethod
    def new_cache(self) -> Cache:
        """An empty cache, of the kind that `encode` takes."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] for hidden states [N, width]."""
        return linear(hidden, self.lm_head.weight, self.lm_head.bias)

    @abstractmethod
    def init_output_bias(self, logits: Tensor) -> None:
        """Begin with these logits [V], such as how often each token occurs, whatever the hidden state."""


class BackboneConfig(ABC):
    """The settings of a network, a frozen dataclass that model folders store; `build` makes the network."""

    max_length: int | None
    """The longest sequence that the network takes; None if there is no limit."""
    causal: bool = False
    """Whether a position sees only itself and those before it."""
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
