"""Wrappers around a denoiser that samplers run through: padding, and counts of calls."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from unmask.context import Cache, Context, Prefix
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.types import Positions, RowFn, Times, Tokens


class PaddedDenoiser(DenoiserWrapper):
    """Passes on which positions [B, L] of a canvas are text: no token attends to the others, the padding."""

    def __init__(self, denoiser: DenoiserLike, valid: Tensor) -> None:
        super().__init__(denoiser)
        self.valid = valid

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
        valid = self.valid if sequence_ids is None else self.valid[sequence_ids]
        if z.shape[1] != valid.shape[1] and context.stages is None and context.cache is None:
            raise ValueError(
                "prompts of different lengths begin with padding, which a sliding window would leave behind:"
                " complete them one by one, or with texts that the model takes as a whole"
            )
        context = replace(context, valid=valid, valid_on_host=None)
        return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        return self.denoiser.new_cache()  # after padding, a prefix does not stand where it stands alone


class CountingDenoiser(DenoiserWrapper):
    """Counts network calls (`nfe`), the sequences in them, and the queries that the head answers."""

    def __init__(self, denoiser: DenoiserLike) -> None:
        super().__init__(denoiser)
        self.nfe = self.num_sequences = self.num_queries = 0

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
        values = self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)
        self.nfe += 1
        self.num_sequences += len(z)
        self.num_queries += len(values)
        return values
