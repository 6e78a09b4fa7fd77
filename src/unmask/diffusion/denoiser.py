"""The denoiser interface: the distribution of the clean token at queried positions, given noisy tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from torch import Tensor

from unmask.context import Cache, Context, Prefix
from unmask.diffusion.process import Process
from unmask.types import LogX, Positions, RowFn, Times, Tokens, Vocab


class DenoiserLike(Protocol):
    """A network as the rest of the library sees it: log_x [N, V] at N queried positions.

    `log_x` is the log-probability of the clean token; its mask column is -inf. It need not sum to one:
    with S = sum(exp(log_x)), a masked position that a reverse step would unmask with probability r
    becomes v with probability r exp(log_x[v]) and stays masked with probability 1 - r S. Where every token has a
    schedule of its own, these are r_v exp(log_x[v]) and 1 - sum(r_v exp(log_x[v])).
    """

    @property
    def vocab(self) -> Vocab:
        """The token ids, and which one is the mask."""
        ...

    @property
    def process(self) -> Process:
        """The forward process, which decides which samplers apply."""
        ...

    @property
    def normalized(self) -> bool:
        """Whether S = 1 in every row: under one schedule, the time at which a position is unmasked is independent of
        its token."""
        ...

    @property
    def time_independent(self) -> bool:
        """Whether log_x depends on z only, not on t, so that it can be reused until z changes."""
        ...

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the network accepts; None if there is no limit."""
        ...

    @property
    def shift_logits(self) -> bool:
        """Whether a token is predicted at the position before it, which must then be part of every call."""
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
        """log_x [N, V], one row for each queried position of z; or the values of `row_fn` for these rows.

        With `row_fn`, log_x, the largest tensor of all, never exists as a whole, and a wrapper may make one row
        depend on the value of another. `sequence_ids` [B] are the indices of these sequences in the canvas: networks
        ignore them, wrappers that hold something per sequence need them.
        """
        ...

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        """A cache for calls that read a text in parts. It is empty, unless what it would hold of the beginning of
        texts with this `prefix` is known already: its `end` says where reading begins."""
        ...


class MergeableRowFn(ABC):
    """A row function that can be merged with others of the same `batch_key`.

    A server applies the merged function to the rows of several requests in one call.
    """

    @abstractmethod
    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor: ...

    @property
    @abstractmethod
    def batch_key(self) -> Hashable:
        """Row functions with equal keys can be merged."""

    @abstractmethod
    def merge(self, others: Sequence[Any], num_queries: Sequence[int]) -> RowFn:
        """One function of the concatenated rows: `num_queries` of each function, this one's first."""


class DenoiserWrapper:
    """Base of denoisers that wrap another one: all properties are those of the wrapped denoiser."""

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

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        return self.denoiser.new_cache(prefix)
