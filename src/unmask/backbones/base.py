"""What a network must offer: hidden states of all positions, and a head for the asked ones."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from unmask.backbones.layers import KVCache
from unmask.types import Times, Tokens


class Backbone(nn.Module):
    """`encode` reads a whole sequence once; `head` is then called on the rows that matter only."""

    max_length: int | None
    """The longest sequence it takes; None where there is no limit."""
    causal: bool
    """Whether a position sees only itself and those before it."""
    timed: bool
    """Whether the hidden states depend on t."""

    @abstractmethod
    def encode(
        self,
        tokens: Tokens,
        t: Times,
        *,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states [B, L, width].

        `valid` [B, L] is False on padding, which nobody looks at; positions with different numbers in
        `documents` [B, L] do not look at each other. With a `cache`, which causal networks
        take, `tokens` are the positions after those it holds.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] for hidden states [N, width]."""

    @abstractmethod
    def expect(self, logits: Tensor) -> None:
        """Begin with these logits [V], such as how often each token occurs, whatever the hidden state."""
