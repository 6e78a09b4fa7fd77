"""Classifier guidance: log p(y | z) of a classifier, added to log_x.

Each guidance wraps a denoiser and is one itself, so they nest: `AllowedTokens(ExactClassifierGuidance(...), ...)`.
Each row of log_x keeps its sum S: it sums to one afterwards if it did before.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.guidance._calls import (
    cache_offset,
    query_indices,
    renormalize_like,
)
from unmask.types import LogX, Positions, RowFn, Times, Tokens

_MAX_CLASSIFIER_TOKENS = 1 << 20
"""Tokens per call of a classifier."""


class Classifier(Protocol):
    """A classifier of noisy text: the log-probability of the wanted property y."""

    def __call__(self, z: Tokens) -> Tensor:
        """log p(y | z) [N] for sequences z [N, L], some of whose tokens are masks."""
        ...


class ExactClassifierGuidance(DenoiserWrapper):
    """log_x[v] + scale log p(y | z with v at the queried position), for every v, up to normalization.

    Exact, for small vocabularies: the classifier reads V - 1 sequences for each query.
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
        sequence, position = query_indices(positions)

        def guided(log_x: LogX, indices: slice | Tensor) -> Tensor:
            class_log_probs = self._class_log_probs(z[sequence[indices]], position[indices]).to(log_x)
            log_x = renormalize_like(log_x, log_x + self.scale * class_log_probs)
            return log_x if row_fn is None else row_fn(log_x, indices)

        return self.denoiser(z, t, positions, context, row_fn=guided, sequence_ids=sequence_ids)

    def _class_log_probs(self, z: Tokens, positions: Tensor) -> Tensor:
        """log p(y | z with v at its position) [n, V] for sequences [n, L]; 0 for the mask."""
        clean = torch.arange(self.vocab.size, device=z.device)
        clean = clean[clean != self.vocab.mask_id]
        result = z.new_zeros(len(z), self.vocab.size, dtype=torch.float64)
        chunk_size = max(1, _MAX_CLASSIFIER_TOKENS // (len(clean) * z.shape[1]))
        for first in range(0, len(z), chunk_size):
            chunk = slice(first, first + chunk_size)
            candidates = z[chunk, None].repeat(1, len(clean), 1)
            candidates[torch.arange(len(candidates)), :, positions[chunk]] = clean
            result[chunk, clean] = self.classifier(candidates.flatten(0, 1)).view(-1, len(clean)).double()
        return result


class DifferentiableClassifier(Protocol):
    """A classifier with gradients: it reads embedded tokens."""

    @property
    def embedding(self) -> Tensor:
        """[V, D]: the embedding of each token, the mask included."""
        ...

    def __call__(self, embeddings: Tensor) -> Tensor:
        """log p(y | z) [B] for the embedded tokens [B, L, D] of noisy sequences."""
        ...


class TaylorClassifierGuidance(DenoiserWrapper):
    """log_x[v] + scale g[v], where g is the gradient of log p(y | z) with respect to the one-hot input of the query.

    For large vocabularies: one forward and one backward pass of the classifier per call. It is exact where
    log p(y | z) is linear in the one-hot inputs, and a first-order Taylor approximation elsewhere.
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
        # [N, D]: the gradient with respect to a one-hot input is its product with the embedding.
        grad = self._embedding_grad(z, embedding)[query_indices(positions)]

        def guided(log_x: LogX, indices: slice | Tensor) -> Tensor:
            class_grad = grad[indices] @ embedding.t()
            log_x = renormalize_like(log_x, log_x + self.scale * class_grad.to(log_x))
            return log_x if row_fn is None else row_fn(log_x, indices)

        return self.denoiser(z, t, positions, context, row_fn=guided, sequence_ids=sequence_ids)

    def _embedding_grad(self, z: Tokens, embedding: Tensor) -> Tensor:
        """d log p(y | z)/d embedded tokens [B, L, D]."""
        with torch.inference_mode(False), torch.enable_grad():
            embedded = embedding[z].clone().requires_grad_()  # a clone, as z may come from inference mode
            (grad,) = torch.autograd.grad(self.classifier(embedded).sum(), embedded)
        return grad


def _validate_scale(scale: float) -> float:
    if not math.isfinite(scale):
        raise ValueError(f"the scale of guidance must be a finite number; got {scale}")
    return scale


def _require_no_cache(context: Context) -> None:
    if cache_offset(context) is not None:
        raise ValueError(
            "a classifier must read the whole text, and a sampler with a cache passes a part of it at a time;"
            " sample without a cache"
        )
