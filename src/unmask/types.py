"""The words every module shares: tokens, times, rows, log_x; a vocabulary; a batch.

`x` is clean, `z` is noisy, `log_x` is a prediction of `x`; `s < t` are times;
B sequences of L positions over V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.context import Context


class NonFiniteError(ValueError):
    """A network does not answer with probabilities: its weights are damaged."""


Tokens: TypeAlias = Tensor
"""int64 [B, L]."""

Times: TypeAlias = Tensor
"""float [B, 1] (one time a sequence) or [B, L]; 0 is data, 1 is all mask."""

Positions: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Positions of a [B, L] tensor: booleans [B, L], or indices (sequence, position), in any order; see `Queries`."""


class Queries(tuple[Tensor, Tensor]):
    """Queried positions as indices (sequence [N], position [N]), in the order of the sequences.

    What kernels must know of them is on the host, so that no layer has to wait for the device.
    """

    counts: Tensor
    """int64 [B]: the number of queries of each sequence."""
    max_count: int
    """The largest of the counts."""
    shape: torch.Size
    """[B, L]."""
    facts: tuple[bool, ...]
    """The booleans that were read with the sizes."""

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "B L"], *facts: Tensor) -> Queries:
        """The True positions of booleans [B, L]; sizes and `facts` (boolean scalars) take one host read."""
        counts, batch = mask.sum(1), len(mask)
        numbers = torch.cat([counts, *(fact.view(1) for fact in facts)]).tolist()
        total, length = sum(numbers[:batch]), max(1, mask.shape[1])
        flags = mask.flatten()
        # Like nonzero(), whose result would have to be waited for: index i goes to slot cumsum(i) - 1.
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
        queries.shape, queries.facts = shape, ()
        return queries

    @classmethod
    def resolve(cls, positions: Positions, shape: torch.Size, *facts: Tensor) -> tuple[Queries, Tensor | None]:
        """The queries of any kind of positions, and the order in which they were asked for (None: as they are)."""
        if isinstance(positions, Queries):
            return positions._with_facts(*facts), None
        if isinstance(positions, Tensor):
            return cls.from_mask(positions, *facts), None
        mask = torch.zeros(shape, dtype=torch.bool, device=positions[0].device)
        mask[positions] = True
        order = (mask.flatten().cumsum(0) - 1).view(shape)[positions]
        return cls.from_mask(mask, *facts), order

    def _with_facts(self, *facts: Tensor) -> Queries:
        """The same queries; `facts`, if there are any, take one host read."""
        if not facts:
            return self
        return self._copy(self.shape, tuple(torch.stack(facts).tolist()))

    def in_longer(self, length: int) -> Queries:
        """The same positions of sequences of `length` tokens."""
        return self._copy(torch.Size((self.shape[0], length)), self.facts)

    def _copy(self, shape: torch.Size, facts: tuple[bool, ...]) -> Queries:
        queries = Queries((self[0], self[1]))
        queries.counts, queries.max_count, queries.shape, queries.facts = self.counts, self.max_count, shape, facts
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
"""float [N, V]: one line of log-probabilities of the clean token for each asked row."""

RowFn: TypeAlias = Callable[[LogX, slice | Tensor], Tensor]
"""A number, or a few, for each line of log_x, given some of the lines and which of all these are."""

ProgressFn: TypeAlias = Callable[[int], None]
"""Is called with how much of a long piece of work is done so far."""


@dataclass(frozen=True)
class Vocab:
    """`size` token ids, one of which, `mask`, means "hidden" and is never data; another may `end` a text."""

    size: int
    mask_id: int
    eos_id: int | None = None

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a vocabulary needs a token and the mask, so size >= 2; got {self.size}")
        if not 0 <= self.mask_id < self.size:
            raise ValueError(f"the mask id {self.mask_id} is outside the vocabulary 0..{self.size - 1}")
        if self.eos_id is not None and not (0 <= self.eos_id < self.size and self.eos_id != self.mask_id):
            raise ValueError(
                f"the id {self.eos_id} that ends a text must be in the vocabulary 0..{self.size - 1},"
                f" and not the mask, {self.mask_id}"
            )

    def validate(self, tokens: Tokens, *, clean: bool = False) -> None:
        """Refuse ids outside the vocabulary and, in `data`, the mask id."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"token ids must be integers (int64); got {tokens.dtype}")
        if tokens.numel() == 0:
            return
        for worst in (int(tokens.min()), int(tokens.max())):
            if not 0 <= worst < self.size:
                raise ValueError(f"token id {worst} is outside the vocabulary 0..{self.size - 1}")
        if clean and bool((tokens == self.mask_id).any()):
            raise ValueError(
                f"the data contains the mask id {self.mask_id}, which stands for a hidden token;"
                " remove it or use a tokenizer that cannot produce it"
            )


class NoiseGroup(NamedTuple):
    """Consecutive rows of a batch that are rows `row_offset ...` of a global batch with its own generator."""

    generator: torch.Generator
    num_rows: int
    row_offset: int
    global_batch_size: int


@dataclass(frozen=True)
class Batch:
    """Clean sequences, and where they stand in the step's global batch.

    `valid` is False on padding and `frozen` is True on tokens that are given (a prompt): neither is
    noised or counted. Tokens of different `documents` (numbers) do not look at each other. A rank or
    micro-batch holds the rows `row_offset ...` of `global_batch_size`, so that noise drawn for a row does not
    depend on how the global batch was split. With `noise_groups`, which then cover all rows, the noise of each
    group is drawn apart from the others': a network call may serve several requests.
    """

    tokens: Tokens
    valid: Tensor | None = None
    prompt_mask: Tensor | None = None
    row_offset: int = 0
    global_batch_size: int | None = None
    document_ids: Tensor | None = None
    noise_groups: tuple[NoiseGroup, ...] = ()
    checked_vocab: Vocab | None = None
    """The vocabulary that the tokens were checked against: they are not checked again in every step."""

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
                f"rows {self.row_offset}..{self.row_offset + len(self.tokens) - 1} do not fit"
                f" into a global batch of {self.resolved_global_batch_size} rows"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def checked(self, vocab: Vocab) -> Batch:
        """The same batch, known to have valid ids; ValueError for ids outside the vocabulary, and for the mask id
        anywhere but on padding."""
        if self.checked_vocab == vocab:
            return self
        vocab.validate(self.tokens)
        vocab.validate(self.tokens if self.valid is None else self.tokens[self.valid], clean=True)
        return replace(self, checked_vocab=vocab)

    @property
    def resolved_global_batch_size(self) -> int:
        """Sequences in the step's global batch."""
        return self.row_offset + len(self.tokens) if self.global_batch_size is None else self.global_batch_size

    def split_by_noise(self, generator: torch.Generator) -> Iterator[tuple[Batch, torch.Generator]]:
        """The tokens whose noise is drawn together, and from which generator: all at once, without groups."""
        if not self.noise_groups:
            yield self, generator
            return
        parts = torch.split(self.tokens, [group.num_rows for group in self.noise_groups])
        for part, group in zip(parts, self.noise_groups, strict=True):
            yield Batch(part, row_offset=group.row_offset, global_batch_size=group.global_batch_size), group.generator

    @property
    def loss_mask(self) -> Tensor:
        """[B, L] booleans: the tokens that are noised and whose nats count."""
        counted = torch.ones_like(self.tokens, dtype=torch.bool)
        if self.valid is not None:
            counted &= self.valid
        if self.prompt_mask is not None:
            counted &= ~self.prompt_mask
        return counted

    def loss_positions(self) -> Queries:
        """The positions of the loss mask. Without padding and prompts these are all, and nothing is read."""
        if self.valid is None and self.prompt_mask is None:
            return Queries.everywhere(self.tokens.shape, self.tokens.device)
        return Queries.from_mask(self.loss_mask)

    @property
    def context(self) -> Context:
        """What a network must know beside the tokens: which are padding, and which document each is of."""
        return Context(valid=self.valid, document_ids=self.document_ids)

    def truncated(self, length: int) -> Batch:
        """The first `length` tokens of every row; what a row has once, such as a label [B], stays."""
        tensors = {name: tensor for name, tensor in self._named_tensors().items() if tensor.ndim > 1}
        return self._replace_tensors({name: tensor[:, :length] for name, tensor in tensors.items()})

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        tensors = self._named_tensors().items()
        return self._replace_tensors({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors})

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which it is copied to a GPU asynchronously."""
        return self._replace_tensors({name: tensor.pin_memory() for name, tensor in self._named_tensors().items()})

    def _named_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _replace_tensors(self, tensors: dict[str, Any]) -> Batch:
        return replace(self, **tensors)
