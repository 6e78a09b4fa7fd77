"""The seam: given the visible tokens, what is the token at this hidden position?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from unmask.context import Cache, Context
from unmask.diffusion.process import Process
from unmask.types import LogX, Positions, RowFn, Times, Tokens, Vocab


class DenoiserLike(Protocol):
    """A network as everything else sees it: asked at chosen rows, answering with log_x [N, V].

    `log_x` is the log-probability of the clean token; its mask column is -inf. It need not sum to one:
    with S = sum(exp(log_x)), a masked position that a reverse step would reveal with probability r
    becomes v with probability r exp(log_x[v]) and stays masked with 1 - r S.
    """

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        ...

    @property
    def process(self) -> Process:
        """How text is destroyed, and so which samplers can restore it."""
        ...

    @property
    def normalized(self) -> bool:
        """S = 1 on every line: *when* a token is revealed does not depend on *what* it is."""
        ...

    @property
    def time_independent(self) -> bool:
        """The answer depends on z alone, not on t: it holds until z changes."""
        ...

    @property
    def max_length(self) -> int | None:
        """The longest sequence the network takes; None where there is no limit."""
        ...

    @property
    def shift_logits(self) -> bool:
        """A token is predicted where the one before it is read, so that one must be in every call."""
        ...

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        """One line of log_x for each row of z that is asked.

        With `each`, what it says of every line instead: then log_x, the largest tensor there is, need never
        be whole, and what is said of one line may decide what another is like. `which` sequences of a canvas
        these are [B] is of no interest to a network, but to denoisers that know something of each of them.
        """
        ...

    def new_cache(self) -> Cache:
        """An empty cache, for calls that read a text part by part."""
        ...


class BatchableRowFn(ABC):
    """An `Each` that can speak for others of its `kind` too, whose lines follow its own."""

    @abstractmethod
    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor: ...

    @property
    @abstractmethod
    def batch_key(self) -> Hashable:
        """What those that can be joined have in common."""

    @abstractmethod
    def merge(self, others: Sequence[Any], num_queries: Sequence[int]) -> RowFn:
        """What it and the others say of their lines one after another: so many of each, its own first."""


class DenoiserWrapper:
    """A denoiser around another, which it is like in all but its call."""

    def __init__(self, denoiser: DenoiserLike) -> None:
        self.denoiser = denoiser

    @property
    def vocab(self) -> Vocab:
        return self.denoiser.vocab

    @property
    def process(self) -> Process:
        return self.denoiser.process

    @property
    def normalized(self) -> bool:
        return self.denoiser.normalized

    @property
    def time_independent(self) -> bool:
        return self.denoiser.time_independent

    @property
    def max_length(self) -> int | None:
        return self.denoiser.max_length

    @property
    def shift_logits(self) -> bool:
        return self.denoiser.shift_logits

    def new_cache(self) -> Cache:
        return self.denoiser.new_cache()
