"""Guidance: denoisers around a denoiser, whose log_x they pull towards a condition.

Each is built from a denoiser and is one itself, so that they nest: `AllowedTokens(ClassifierFreeGuidance(...), ...)`. A
line keeps its mass S: it sums to one afterwards if it did before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.guidance.calls import (
    cache_offset,
    query_indices,
    renormalize_like,
    resolve_sequence_ids,
    validate_shape,
)
from unmask.types import LogX, Positions, RowFn, Times, Tokens

_MAX_CLASSIFIER_TOKENS = 1 << 20
"""Tokens that a classifier reads at a time."""


class ClassifierFreeGuidance(DenoiserWrapper):
    """log_x = (1 + w) log p(. | given) - w log p(. | given hidden), w being the `scale`.

    `given` [L] or, by the numbers of the sequences, [B, L] are booleans: the condition, such as a prompt or a
    class token, which the mask hides for the second answer. A call reads twice as many sequences, at once.
    """

    def __init__(self, denoiser: DenoiserLike, condition: Tensor, scale: float) -> None:
        super().__init__(denoiser)
        if condition.dtype != torch.bool or condition.ndim not in (1, 2):
            raise ValueError(
                f"given must be booleans [L] or [B, L]; got {condition.dtype} of shape {list(condition.shape)}"
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
                "classifier-free guidance reads a text with its condition and without it, which have no cache"
                " in common; sample without a cache"
            )
        sequence_ids = resolve_sequence_ids(z, sequence_ids)
        validate_shape(z, sequence_ids, None, self.condition.shape, "the given places")
        given = self.condition.to(z.device)
        given = given if given.ndim == 1 else given[sequence_ids]
        both = torch.cat([z, z.masked_fill(given, self.vocab.mask_id)])
        context = replace(
            context,
            valid=_duplicate(context.valid, len(z)),
            document_ids=_duplicate(context.document_ids, len(z)),
        )
        sequence, place = query_indices(positions)
        copies = (torch.cat([sequence, sequence + len(z)]), torch.cat([place, place]))
        lines = self.denoiser(
            both, torch.cat([t, t]), copies, context, sequence_ids=torch.cat([sequence_ids, sequence_ids])
        )
        log_x = self._guide(*lines.chunk(2))
        return log_x if row_fn is None else row_fn(log_x, slice(None))

    def _guide(self, conditional: LogX, unconditional: LogX) -> LogX:
        # What both exclude, as the mask, stays excluded; what only the second does is left to the first.
        unconditional = torch.where(unconditional == -torch.inf, conditional, unconditional)
        pulled = conditional + self.scale * (conditional - unconditional).nan_to_num()
        return renormalize_like(conditional, pulled)


class Classifier(Protocol):
    """What a noisy text says about the property that is wanted."""

    def __call__(self, z: Tokens) -> Tensor:
        """log p(y | z) [N] for sequences z [N, L], some of whose tokens are masks."""
        ...


class ExactClassifierGuidance(DenoiserWrapper):
    """log_x[v] + scale log p(y | z with v in the asked place), for every v.

    Exact, and for small vocabularies: the classifier reads V - 1 sequences for each asked place.
    """

    def __init__(self, denoiser: DenoiserLike, classifier: Classifier, scale: float = 1.0) -> None:
        super().__init__(denoiser)
        self.classifier, self.scale = classifier, _validate_scale(scale)

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
        _require_no_cache(context)
        sequence, place = query_indices(positions)

        def guided(log_x: LogX, indices: slice | Tensor) -> Tensor:
            said = self._class_log_probs(z[sequence[indices]], place[indices]).to(log_x)
            log_x = renormalize_like(log_x, log_x + self.scale * said)
            return log_x if row_fn is None else row_fn(log_x, indices)

        return self.denoiser(z, t, positions, context, row_fn=guided, sequence_ids=sequence_ids)

    def _class_log_probs(self, z: Tokens, positions: Tensor) -> Tensor:
        """log p(y | z with v at its place) [n, V] for sequences [n, L]; nothing is said of the mask."""
        words = torch.arange(self.vocab.size, device=z.device)
        words = words[words != self.vocab.mask_id]
        said = z.new_zeros(len(z), self.vocab.size, dtype=torch.float64)
        at_once = max(1, _MAX_CLASSIFIER_TOKENS // (len(words) * z.shape[1]))
        for first in range(0, len(z), at_once):
            part = slice(first, first + at_once)
            tried = z[part, None].repeat(1, len(words), 1)
            tried[torch.arange(len(tried)), :, positions[part]] = words
            said[part, words] = self.classifier(tried.flatten(0, 1)).view(-1, len(words)).double()
        return said


class DifferentiableClassifier(Protocol):
    """A classifier that a gradient can be taken of: it reads embedded tokens."""

    @property
    def embedding(self) -> Tensor:
        """[V, D]: what stands for each token, the mask included."""
        ...

    def __call__(self, embeddings: Tensor) -> Tensor:
        """log p(y | z) [B] for the embedded tokens [B, L, D] of noisy sequences."""
        ...


class TaylorClassifierGuidance(DenoiserWrapper):
    """log_x[v] + scale g[v], g being the gradient of log p(y | z) with respect to the one-hot
    input of the asked place.

    For large vocabularies: the classifier reads each sequence once, forwards and backwards, whatever V is.
    It is exact where log p(y | z) is linear in the one-hot inputs, and else as good as a tangent.
    """

    def __init__(self, denoiser: DenoiserLike, classifier: DifferentiableClassifier, scale: float = 1.0) -> None:
        super().__init__(denoiser)
        self.classifier, self.scale = classifier, _validate_scale(scale)
        if len(classifier.embedding) != self.vocab.size:
            raise ValueError(
                f"the classifier embeds {len(classifier.embedding)} tokens and the model has"
                f" {self.vocab.size}: they must share a vocabulary"
            )

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
        _require_no_cache(context)
        embedding = self.classifier.embedding.detach()
        slope = self._embedding_grad(z, embedding)[
            query_indices(positions)
        ]  # [N, D]: a one-hot's gradient is its product with E

        def guided(log_x: LogX, indices: slice | Tensor) -> Tensor:
            said = slope[indices] @ embedding.t()
            log_x = renormalize_like(log_x, log_x + self.scale * said.to(log_x))
            return log_x if row_fn is None else row_fn(log_x, indices)

        return self.denoiser(z, t, positions, context, row_fn=guided, sequence_ids=sequence_ids)

    def _embedding_grad(self, z: Tokens, embedding: Tensor) -> Tensor:
        """d log p(y | z)/d embedded tokens [B, L, D]."""
        with torch.inference_mode(False), torch.enable_grad():
            embedded = embedding[z].clone().requires_grad_()  # a clone, as z may come from inference mode
            (slope,) = torch.autograd.grad(self.classifier(embedded).sum(), embedded)
        return slope


def _validate_scale(scale: float) -> float:
    if not math.isfinite(scale):
        raise ValueError(f"the scale of guidance must be a finite number; got {scale}")
    return scale


def _duplicate(values: Tensor | None, batch_size: int) -> Tensor | None:
    """Values of each sequence, for the sequences and their copies; values that all share stay as they are."""
    return values if values is None or len(values) != batch_size else torch.cat([values, values])


def _require_no_cache(context: Context) -> None:
    if cache_offset(context) is not None:
        raise ValueError(
            "a classifier must read the whole text, and a sampler with a cache shows a part of it at a time;"
            " sample without one"
        )
