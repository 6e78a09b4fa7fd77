"""Classifier-free guidance: the model with its condition against the model without it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.guidance._calls import (
    cache_offset,
    query_indices,
    renormalize_like,
    resolve_sequence_ids,
    validate_shape,
)
from unmask.types import LogX, Positions, RowFn, Times, Tokens


class ClassifierFreeGuidance(DenoiserWrapper):
    """log_x = (1 + w) log p(. | condition) - w log p(. | condition masked), up to normalization; w is the `scale`.

    `condition` is bool [L] or, by sequence of the canvas, [B, L]: the positions of a prompt or class token, which are
    masked in the second half of the batch. A call reads twice as many sequences.
    """

    def __init__(self, denoiser: DenoiserLike, condition: Tensor, scale: float) -> None:
        super().__init__(denoiser)
        if condition.dtype != torch.bool or condition.ndim not in (1, 2):
            raise ValueError(
                f"condition must be booleans [L] or [B, L]; got {condition.dtype} of shape {list(condition.shape)}"
            )
        if not 0 <= scale < torch.inf:
            raise ValueError(f"the scale of guidance must be 0 (none) or above; got {scale}")
        self.condition, self.scale = condition, scale

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
        if cache_offset(context) is not None:
            raise ValueError(
                "classifier-free guidance evaluates the model with and without the condition, which cannot share a"
                " cache; sample without a cache"
            )
        sequence_ids = resolve_sequence_ids(z, sequence_ids)
        validate_shape(z, sequence_ids, None, self.condition.shape, "the positions of the condition")
        condition = self.condition.to(z.device)
        condition = condition if condition.ndim == 1 else condition[sequence_ids]
        both = torch.cat([z, z.masked_fill(condition, self.vocab.mask_id)])
        context = replace(
            context,
            valid=_duplicate(context.valid, len(z)),
            valid_on_host=None,
            document_ids=_duplicate(context.document_ids, len(z)),
        )
        sequence, position = query_indices(positions)
        copies = (torch.cat([sequence, sequence + len(z)]), torch.cat([position, position]))
        values = self.denoiser(
            both, torch.cat([t, t]), copies, context, sequence_ids=torch.cat([sequence_ids, sequence_ids])
        )
        log_x = self._guide(*values.chunk(2))
        return log_x if row_fn is None else row_fn(log_x, slice(None))

    def _guide(self, conditional: LogX, unconditional: LogX) -> LogX:
        # Tokens that both exclude, such as the mask, stay excluded; the conditional model decides the others.
        unconditional = torch.where(unconditional == -torch.inf, conditional, unconditional)
        guided = conditional + self.scale * (conditional - unconditional).nan_to_num()
        return renormalize_like(conditional, guided)


def _duplicate(values: Tensor | None, batch_size: int) -> Tensor | None:
    """Values of each sequence, for the sequences and their copies; values that all share stay as they are."""
    return values if values is None or len(values) != batch_size else torch.cat([values, values])
