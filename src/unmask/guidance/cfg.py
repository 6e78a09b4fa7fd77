"""Classifier-free guidance: the model with its condition against the model without it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unmask.context import Cache, CacheView, Context, Prefix
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
    masked in the second half of the batch. A call reads twice as many sequences; beside a cache it is two calls of the
    network, because what is kept of the text differs.
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
        sequence_ids, offset = resolve_sequence_ids(z, sequence_ids), cache_offset(context)
        validate_shape(z, sequence_ids, offset, self.condition.shape, "the positions of the condition")
        condition = self.condition.to(z.device)[..., (offset or 0) : (offset or 0) + z.shape[1]]
        condition = condition if condition.ndim == 1 else condition[sequence_ids]
        masked = z.masked_fill(condition, self.vocab.mask_id)
        if isinstance(context.cache, _PairedView):
            log_x = self._guide(
                *(
                    self.denoiser(tokens, t, positions, replace(context, cache=view), sequence_ids=sequence_ids)
                    for tokens, view in zip((z, masked), context.cache.views, strict=True)
                )
            )
            return log_x if row_fn is None else row_fn(log_x, slice(None))
        context = replace(
            context,
            valid=_duplicate(context.valid, len(z)),
            valid_on_host=None,
            document_ids=_duplicate(context.document_ids, len(z)),
        )
        sequence, position = query_indices(positions)
        copies = (torch.cat([sequence, sequence + len(z)]), torch.cat([position, position]))
        values = self.denoiser(
            torch.cat([z, masked]),
            torch.cat([t, t]),
            copies,
            context,
            sequence_ids=torch.cat([sequence_ids, sequence_ids]),
        )
        log_x = self._guide(*values.chunk(2))
        return log_x if row_fn is None else row_fn(log_x, slice(None))

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        # The prefix is masked in one half, and what is cached of it differs.
        return _PairedCache((self.denoiser.new_cache(), self.denoiser.new_cache()))

    def _guide(self, conditional: LogX, unconditional: LogX) -> LogX:
        # Tokens that both exclude, such as the mask, stay excluded; the conditional model decides the others.
        unconditional = torch.where(unconditional == -torch.inf, conditional, unconditional)
        guided = conditional + self.scale * (conditional - unconditional).nan_to_num()
        return renormalize_like(conditional, guided)


class _PairedCache(Cache):
    """What the network keeps of the text with the condition, and of the text without it."""

    def __init__(self, caches: tuple[Cache, Cache]) -> None:
        self.caches = caches

    @property
    def end(self) -> int:
        return self.caches[0].end

    def view(
        self, start: int | None = None, keep: int | None = None, sequence_ids: Tensor | None = None
    ) -> _PairedView:
        return _PairedView(tuple(cache.view(start, keep, sequence_ids) for cache in self.caches))

    def select(self, sequence_ids: Tensor) -> None:
        for cache in self.caches:
            cache.select(sequence_ids)

    def evict_before(self, position: int) -> None:
        for cache in self.caches:
            cache.evict_before(position)


class _PairedView(CacheView):
    """A call beside a `_PairedCache`."""

    def __init__(self, views: tuple[CacheView, ...]) -> None:
        self.views = views

    @property
    def start(self) -> int:
        return self.views[0].start


def _duplicate(values: Tensor | None, batch_size: int) -> Tensor | None:
    """Values of each sequence, for the sequences and their copies; values that all share stay as they are."""
    return values if values is None or len(values) != batch_size else torch.cat([values, values])
