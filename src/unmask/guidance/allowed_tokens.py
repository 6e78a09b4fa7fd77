"""Hard constraints by position: which tokens may be written."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper, MergeableRowFn
from unmask.guidance._calls import (
    cache_offset,
    query_indices,
    renormalize_like,
    resolve_sequence_ids,
    validate_shape,
)
from unmask.types import LogX, Positions, RowFn, Times, Tokens


@dataclass(frozen=True, eq=False)
class _RestrictTokens(MergeableRowFn):
    """Restricts rows of log_x to the allowed tokens [V], then applies another row function, if there is one."""

    allowed: Tensor
    row_fn: MergeableRowFn | None

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        never = ~self.allowed.to(log_x.device)
        log_x = renormalize_like(log_x, log_x.masked_fill(never, -torch.inf))
        return log_x if self.row_fn is None else self.row_fn(log_x, indices)

    @property
    def batch_key(self) -> Hashable:
        return _RestrictTokens, id(self.allowed), None if self.row_fn is None else self.row_fn.batch_key

    def merge(self, others: Sequence[_RestrictTokens], num_queries: Sequence[int]) -> RowFn:
        if self.row_fn is None:
            return self
        merged = self.row_fn.merge([other.row_fn for other in others], num_queries)
        return lambda log_x, indices: merged(_RestrictTokens(self.allowed, None)(log_x, indices), indices)


class AllowedTokens(DenoiserWrapper):
    """log_x restricted to the allowed tokens, renormalized.

    `allowed` is bool [V] for all positions, [L, V] by position, or [B, L, V] by sequence and position. A masked
    position without an allowed token raises ValueError at the first call, before anything is drawn.
    """

    def __init__(self, denoiser: DenoiserLike, allowed: Tensor) -> None:
        super().__init__(denoiser)
        if allowed.dtype != torch.bool or allowed.ndim not in (1, 2, 3) or allowed.shape[-1] != self.vocab.size:
            raise ValueError(
                f"allowed must be booleans [V], [L, V] or [B, L, V] with V = {self.vocab.size};"
                f" got {allowed.dtype} of shape {list(allowed.shape)}"
            )
        if bool(allowed[..., self.vocab.mask_id].any()):
            allowed = allowed.clone()
            allowed[..., self.vocab.mask_id] = False
        self.allowed = allowed
        self.any_allowed = self.allowed.any(-1)

    @classmethod
    def ban(cls, denoiser: DenoiserLike, ids: Iterable[int]) -> AllowedTokens:
        """Everything but these ids, at all positions."""
        allowed = torch.ones(denoiser.vocab.size, dtype=torch.bool)
        allowed[_validate_ids(denoiser, ids)] = False
        return cls(denoiser, allowed)

    @classmethod
    def at_positions(
        cls, denoiser: DenoiserLike, ids_by_position: Mapping[int, Iterable[int]], length: int
    ) -> AllowedTokens:
        """Only these ids at these positions of sequences of `length` tokens, any token elsewhere."""
        allowed = torch.ones(length, denoiser.vocab.size, dtype=torch.bool)
        for position, ids in ids_by_position.items():
            if not 0 <= position < length:
                raise ValueError(f"position {position} is outside a text of {length} tokens, 0..{length - 1}")
            allowed[position] = False
            allowed[position, _validate_ids(denoiser, ids)] = True
        return cls(denoiser, allowed)

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
        everywhere = self.allowed.ndim == 1 and bool(self.any_allowed) and not self.process.inserts_tokens
        if everywhere and (row_fn is None or isinstance(row_fn, MergeableRowFn)):
            return self.denoiser(
                z,
                t,
                positions,
                context,
                row_fn=_RestrictTokens(self.allowed, row_fn),
                sequence_ids=sequence_ids,
            )
        sequence_ids, start = resolve_sequence_ids(z, sequence_ids), cache_offset(context)
        if self.allowed.ndim > 1:
            validate_shape(z, sequence_ids, start, self.allowed.shape[:-1], "the allowed tokens")
        self._validate_holes(z, sequence_ids, start or 0)
        sequence, position = query_indices(positions)
        sequence, position = sequence_ids[sequence], position + (start or 0)

        def restrict(log_x: LogX, indices: slice | Tensor) -> Tensor:
            here: tuple[Tensor, ...] = (sequence[indices], position[indices])
            here = here[3 - self.allowed.ndim :]
            allowed = self.allowed[tuple(index.to(self.allowed.device) for index in here)]
            never = ~allowed.to(log_x.device)
            if not self.process.inserts_tokens:
                log_x = renormalize_like(log_x, log_x.masked_fill(never, -torch.inf))
            else:  # in the column of the mask is a rate, which no token changes
                mask = torch.tensor([self.vocab.mask_id], device=log_x.device)
                tokens = log_x.index_fill(-1, mask, -torch.inf)
                tokens = renormalize_like(tokens, tokens.masked_fill(never, -torch.inf))
                log_x = tokens.index_copy(-1, mask, log_x[:, mask])
            return log_x if row_fn is None else row_fn(log_x, indices)

        return self.denoiser(z, t, positions, context, row_fn=restrict, sequence_ids=sequence_ids)

    def _validate_holes(self, z: Tokens, sequence_ids: Tensor, offset: int) -> None:
        possible = self.any_allowed
        if possible.ndim == 2:
            possible = possible[sequence_ids.to(possible.device)]
        if possible.ndim:
            possible = possible[..., offset : offset + z.shape[1]]
        stuck = ((z == self.vocab.mask_id) & ~possible.to(z.device)).nonzero()
        if len(stuck):
            sequence, position = stuck[0].tolist()
            raise ValueError(
                f"no token is allowed at the masked position {offset + position} of sequence"
                f" {int(sequence_ids[sequence])}; allow at least one"
            )


def _validate_ids(denoiser: DenoiserLike, ids: Iterable[int]) -> list[int]:
    wanted = list(ids)
    for id_ in wanted:
        if not 0 <= id_ < denoiser.vocab.size:
            raise ValueError(f"token id {id_} is outside the vocabulary 0..{denoiser.vocab.size - 1}")
    return wanted
