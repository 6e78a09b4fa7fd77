"""Both strands of DNA: predictions averaged over a text and its reverse complement (post-hoc conjoining)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.guidance._calls import cache_offset, query_indices, resolve_sequence_ids
from unmask.types import Positions, RowFn, Times, Tokens


class BothStrands(DenoiserWrapper):
    """x_theta(v | z)_l = (p(v | z)_l + p(comp v | rc(z))_(L-1-l))/2, where rc(z)_l = comp z_(L-1-l).

    So predictions are equivariant: those for rc(z) are those for z, read backwards and complemented, and samples of
    both strands have the same law. A call reads twice as many sequences.
    """

    def __init__(self, denoiser: DenoiserLike, complement_ids: Sequence[int]) -> None:
        super().__init__(denoiser)
        self.complement = torch.tensor(complement_ids)
        size, mask = denoiser.vocab.size, denoiser.vocab.mask_id
        if len(complement_ids) != size or complement_ids[mask] != mask:
            raise ValueError(f"complement_ids must be those of all {size} ids, and that of the mask itself")
        if not torch.equal(self.complement[self.complement], torch.arange(size)):
            raise ValueError("the complement of a complement must be the id itself")
        if denoiser.process.is_left_to_right:
            raise ValueError("both strands can be read by networks that read in both directions, and not from the left")

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
        if cache_offset(context) is not None or context.stages is not None:
            raise ValueError(
                "the other strand is read backwards, so it needs the whole text: sample without cache or blocks"
            )
        complement = self.complement.to(z.device)
        sequence, position = query_indices(positions)
        sequence_ids = resolve_sequence_ids(z, sequence_ids)
        both = replace(
            context,
            valid=_with_reverse(context.valid),
            valid_on_host=None,
            document_ids=_with_reverse(context.document_ids),
            segment_ids=_with_reverse(context.segment_ids),
        )
        values = self.denoiser(
            torch.cat([z, complement[z].flip(1)]),
            torch.cat([t, t.flip(1)]),
            (torch.cat([sequence, sequence + len(z)]), torch.cat([position, z.shape[1] - 1 - position])),
            both,
            sequence_ids=torch.cat([sequence_ids, sequence_ids]),
        )
        forward, backward = values.chunk(2)
        log_x = torch.logaddexp(forward, backward[:, complement]) - math.log(2)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


def _with_reverse(values: Tensor | None) -> Tensor | None:
    """Values [B, L] of the text, and of its other strand."""
    return None if values is None else torch.cat([values, values.flip(1)])
