"""Types that all modules share: tokens, times, positions, log_x; a vocabulary; a batch.

`x` is clean, `z` is noisy, `log_x` is a prediction of `x`; `s < t` are times;
B sequences of L positions over V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from unmask.context import Context


class NonFiniteError(ValueError):
    """A network's output is NaN: its weights are damaged."""


Tokens: TypeAlias = Tensor
"""int64 [B, L]."""

Times: TypeAlias = Tensor
"""float [B, 1] (one time per sequence) or [B, L]; 0 is data, 1 is all mask."""

Positions: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Positions of a [B, L] tensor: booleans [B, L], or indices (sequence, position), in any order; see `Queries`."""


class Queries(tuple[Tensor, Tensor]):
    """Queried positions as indices (sequence [N], position [N]), in the order of the sequences.

    The numbers that kernels need are kept on the host, so that no layer synchronizes with the device.
    """

    counts: Tensor
    """int64 [B]: the number of queries of each sequence."""
    max_count: int
    """The largest of the counts."""
    shape: torch.Size
    """[B, L]."""
    facts: tuple[bool, ...] = ()
    """Booleans that were read from the device together with the counts."""
    on_host: NDArray[np.bool_] | None = None
    """bool [B, L]: True at the queried positions, if that is known on the host."""

    @classmethod
    def from_host(cls, mask: NDArray[np.bool_], device: torch.device) -> Queries:
        """The True positions of booleans [B, L] that are known on the host: nothing is read."""
        sequence, position = (torch.from_numpy(index).to(device) for index in mask.nonzero())
        queries, counts = cls((sequence, position)), mask.sum(1)
        queries.counts, queries.max_count = torch.from_numpy(counts).to(device), int(counts.max(initial=0))
        queries.shape, queries.on_host = torch.Size(mask.shape), mask
        return queries

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "B L"], *facts: Tensor, known_counts: Sequence[int] = ()) -> Queries:
        """The True positions of booleans [B, L]; sizes and `facts` (boolean scalars) take one host read.

        Where the number of each sequence is known, as `known_counts` [B], nothing is read.
        """
        counts, batch = mask.sum(1), len(mask)
        numbers = known_counts or torch.cat([counts, *(fact.view(1) for fact in facts)]).tolist()
        total, length = sum(numbers[:batch]), max(1, mask.shape[1])
        flags = mask.flatten()
        # Like nonzero(), which would synchronize: index i goes to slot cumsum(i) - 1.
        slot = torch.where(flags, flags.cumsum(0) - 1, total)
        indices = torch.arange(len(flags), device=mask.device)
        index = slot.new_empty(total + 1).scatter_(0, slot, indices)[:total]
        queries = cls((index // length, index % length))
        queries.counts, queries.max_count, queries.shape = counts, max([*numbers[:batch], 0]), mask.shape
        queries.facts = tuple(bool(number) for number in numbers[batch:])
        return queries

    @classmethod
    def everywhere(cls, shape: torch.Size, device: torch.device) -> Queries:
        """All positions."""
        index = torch.arange(shape.numel(), device=device)
        queries = cls((index // max(1, shape[1]), index % max(1, shape[1])))
        queries.counts, queries.max_count = torch.full((shape[0],), shape[1], device=device), shape[1]
        queries.shape, queries.on_host = shape, np.ones(shape, dtype=np.bool_)
        return queries

    @classmethod
    def resolve(
        cls, positions: Positions, shape: torch.Size, *facts: Tensor, on_host: NDArray[np.bool_] | None = None
    ) -> tuple[Queries, Tensor | None]:
        """The queries of any positions, and the permutation to the order given (None if they are in it).

        `facts` are read if sizes must be read: what are queries already have none, and neither have positions that
        are known `on_host`, as booleans [B, L].
        """
        if isinstance(positions, Queries):
            return positions, None
        if isinstance(positions, Tensor):
            return cls.from_mask(positions, *facts), None
        mask = torch.zeros(shape, dtype=torch.bool, device=positions[0].device)
        mask[positions] = True
        order = (mask.flatten().cumsum(0) - 1).view(shape)[positions]
        return cls.from_mask(mask, *facts) if on_host is None else cls.from_host(on_host, mask.device), order

    def in_longer(self, length: int, start: int = 0) -> Queries:
        """The same positions of sequences of `length` tokens, in which these sequences begin at `start`."""
        queries = Queries((self[0], self[1] + start))
        queries.counts, queries.max_count = self.counts, self.max_count
        queries.shape = torch.Size((self.shape[0], length))
        return queries

    def gather(self, values: Tensor) -> Tensor:
        """The values [N] at the queried positions of values [B, 1 or L]."""
        return values.expand(self.shape)[self[0], self[1]]

    @property
    def is_everything(self) -> bool:
        """Whether all positions are queried, in order."""
        return len(self[0]) == self.shape.numel()

    def mask(self) -> Bool[Tensor, "B L"]:
        """Booleans [B, L]: True at the queried positions."""
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self[0].device)
        return mask.index_put(tuple(self), mask.new_ones(()))


LogX: TypeAlias = Float[Tensor, "N V"]
"""float [N, V]: log-probabilities of the clean token, one row for each query."""

RowFn: TypeAlias = Callable[[LogX, slice | Tensor], Tensor]
"""A row function: maps a chunk of log_x [n, V] and the indices of its rows to values [n] or [n, k]."""

ProgressFn: TypeAlias = Callable[[int], None]
"""Called with the amount of work done so far."""


@dataclass(frozen=True)
class Vocab:
    """The token ids of a model, one of which is the mask."""

    size: int
    """The number of ids, the mask included."""
    mask_id: int
    """The id of the mask, which is never data."""
    eos_id: int | None = None
    """The id of the end-of-text token; None if there is none."""
    context_ids: tuple[int, ...] = ()
    """Ids that are read but never predicted, such as N in DNA: no loss is counted on them, no sampler writes them."""
    stop_ids: tuple[int, ...] = ()
    """Ids besides `eos_id` that end an answer, such as the end of a turn in a chat."""

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a vocabulary needs at least one token besides the mask, so size >= 2; got {self.size}")
        if not 0 <= self.mask_id < self.size:
            raise ValueError(f"the mask id {self.mask_id} is outside the vocabulary 0..{self.size - 1}")
        if self.eos_id is not None and not (0 <= self.eos_id < self.size and self.eos_id != self.mask_id):
            raise ValueError(
                f"the end-of-text id {self.eos_id} must be in the vocabulary 0..{self.size - 1},"
                f" and different from the mask id {self.mask_id}"
            )

        for ids, what in ((self.context_ids, "is only context"), (self.stop_ids, "ends an answer")):
            for id_ in ids:
                if not (0 <= id_ < self.size and id_ != self.mask_id):
                    raise ValueError(
                        f"the id {id_} that {what} must be in the vocabulary 0..{self.size - 1}, and not the mask,"
                        f" {self.mask_id}"
                    )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All ids that end a text."""
        return self.stop_ids if self.eos_id is None else (self.eos_id, *self.stop_ids)

    def validate(self, tokens: Tokens, *, clean: bool = False) -> None:
        """ValueError for ids outside the vocabulary and, if the tokens must be `clean`, for the mask id."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"token ids must be integers (int64); got {tokens.dtype}")
        if tokens.numel() == 0:
            return
        for worst in (int(tokens.min()), int(tokens.max())):
            if not 0 <= worst < self.size:
                raise ValueError(f"token id {worst} is outside the vocabulary 0..{self.size - 1}")
        if clean and bool((tokens == self.mask_id).any()):
            raise ValueError(
                f"the data contains the mask id {self.mask_id}, which is not a token of text;"
                " remove it or use a tokenizer that cannot produce it"
            )


class NoiseGroup(NamedTuple):
    """Consecutive rows of a batch whose noise is drawn from a generator of their own."""

    generator: torch.Generator
    """The generator of the group's noise."""
    num_rows: int
    """The number of rows."""
    row_offset: int
    """The index of the first row in the group's global batch."""
    global_batch_size: int
    """The number of rows in the group's global batch."""


@dataclass(frozen=True)
class Batch:
    """Clean sequences, and their place in the step's global batch.

    The noise of a row depends on its index in the global batch only, not on how that was split over ranks and
    microbatches.
    """

    tokens: Tokens
    """int64 [B, L]: the clean tokens."""
    valid: Tensor | None = None
    """bool [B, L]: False on padding, which is neither noised nor counted; None if there is none."""
    prompt_mask: Tensor | None = None
    """bool [B, L]: True on given tokens, which are neither noised nor counted; None if there are none."""
    row_offset: int = 0
    """The index of the first row in the global batch."""
    global_batch_size: int | None = None
    """The number of rows in the global batch; None if it ends with this batch."""
    document_ids: Tensor | None = None
    """int [B, L]: tokens of different documents do not attend to each other; None for one document per row."""
    noise_groups: tuple[NoiseGroup, ...] = ()
    """Groups, covering all rows, whose noise is drawn independently: a network call may serve several requests."""
    checked_vocab: Vocab | None = None
    """The vocabulary that the tokens were checked against; they are not checked again in every step."""
    _host: Batch | None = field(default=None, init=False, repr=False, compare=False)
    """The batch that `to` has copied to the device. It is not copied by `replace`, after which it may be another."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, L]; got shape {list(self.tokens.shape)}")
        for name, flags in (("valid", self.valid), ("prompt_mask", self.prompt_mask)):
            if flags is not None and (flags.shape != self.tokens.shape or flags.dtype != torch.bool):
                raise ValueError(
                    f"{name} must be booleans of shape {list(self.tokens.shape)}; got {flags.dtype} {list(flags.shape)}"
                )
        if self.row_offset < 0 or self.row_offset + len(self.tokens) > self.resolved_global_batch_size:
            raise ValueError(
                f"rows {self.row_offset}..{self.row_offset + len(self.tokens) - 1} are outside"
                f" a global batch of {self.resolved_global_batch_size} rows"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def checked(self, vocab: Vocab) -> Batch:
        """The same batch, marked as checked, with the vocabulary's context ids as given tokens; ValueError for ids
        outside the vocabulary, and for the mask id anywhere but on padding."""
        if self.checked_vocab == vocab:
            return self
        if self._host is not None:
            return self._host.checked(vocab).to(self.tokens.device)
        vocab.validate(self.tokens)
        vocab.validate(self.tokens if self.valid is None else self.tokens[self.valid], clean=True)
        return replace(self, checked_vocab=vocab, prompt_mask=self._given_tokens(vocab.context_ids))

    def _given_tokens(self, context_ids: tuple[int, ...]) -> Tensor | None:
        """The prompt mask, True also on these ids; None if it would be False everywhere."""
        if not context_ids:
            return self.prompt_mask
        context = torch.isin(self.tokens, torch.tensor(context_ids, device=self.tokens.device))
        if not bool(context.any()):
            return self.prompt_mask
        return context if self.prompt_mask is None else self.prompt_mask | context

    @property
    def on_host(self) -> Batch:
        """The same batch in the host's memory, where its tokens can be looked at without waiting for the device."""
        if self._host is not None:
            return self._host
        return self if self.tokens.device.type == "cpu" else self.to(torch.device("cpu"))

    @property
    def resolved_global_batch_size(self) -> int:
        """Sequences in the step's global batch."""
        return self.row_offset + len(self.tokens) if self.global_batch_size is None else self.global_batch_size

    def split_by_noise(self, generator: torch.Generator) -> Iterator[tuple[Batch, torch.Generator]]:
        """The parts of the batch whose noise is drawn together, with their generators; one part without groups."""
        if not self.noise_groups:
            yield self, generator
            return
        parts = torch.split(self.tokens, [group.num_rows for group in self.noise_groups])
        for part, group in zip(parts, self.noise_groups, strict=True):
            yield Batch(part, row_offset=group.row_offset, global_batch_size=group.global_batch_size), group.generator

    @property
    def loss_mask(self) -> Tensor:
        """bool [B, L]: the tokens that are noised and counted in the loss."""
        counted = torch.ones_like(self.tokens, dtype=torch.bool)
        if self.valid is not None:
            counted &= self.valid
        if self.prompt_mask is not None:
            counted &= ~self.prompt_mask
        return counted

    def loss_positions(self) -> Queries:
        """The positions of the loss mask; without padding and prompts all positions, with no host read."""
        if self.valid is None and self.prompt_mask is None:
            return Queries.everywhere(self.tokens.shape, self.tokens.device)
        return Queries.from_host(self.on_host.loss_mask.numpy(), self.tokens.device)

    @property
    def context(self) -> Context:
        """What the network needs besides the tokens: padding and documents."""
        valid = self.on_host.valid
        return Context(self.valid, self.document_ids, valid_on_host=None if valid is None else valid.numpy())

    def truncated(self, length: int) -> Batch:
        """The first `length` tokens of every row; values per row, such as a label [B], are kept."""
        tensors = {name: tensor for name, tensor in self._named_tensors().items() if tensor.ndim > 1}
        return self._replace_tensors({name: tensor[:, :length] for name, tensor in tensors.items()})

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        tensors = self._named_tensors().items()
        moved = self._replace_tensors({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors})
        if self.tokens.device.type == "cpu":
            object.__setattr__(moved, "_host", self)
        return moved

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which it is copied to a GPU asynchronously."""
        return self._replace_tensors({name: tensor.pin_memory() for name, tensor in self._named_tensors().items()})

    def _named_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _replace_tensors(self, tensors: dict[str, Any]) -> Batch:
        return replace(self, **tensors)
