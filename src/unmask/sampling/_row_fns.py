"""Row functions of samplers: a token for each query, and how confident the model is of it.

A denoiser applies them to chunks of log_x [n, V], so that log_x, the largest tensor of all, need never exist as a
whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from unmask.diffusion.categorical import SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import MergeableRowFn
from unmask.types import LogX


@dataclass(frozen=True)
class DrawTokens(MergeableRowFn):
    """Draws a token for each query; -1 where log_x is damaged, which the denoiser reports."""

    params: SamplingParams
    """Temperature and truncation of the distribution."""
    uniform: Float64[Tensor, " N"]
    """float64 [N]: a uniform random number for each query."""
    mask_id: int
    """The id of the mask, which is never drawn."""

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Int64[Tensor, " N"]:
        """int64 [n]."""
        return sample_inverse_cdf(self.params.probabilities(log_x), self.uniform[indices], check=False)

    @property
    def batch_key(self) -> Hashable:
        return DrawTokens, self.params, self.mask_id

    def merge(self, others: Sequence[DrawTokens], _num_queries: Sequence[int]) -> DrawTokens:
        return replace(self, uniform=torch.cat([self.uniform, *(other.uniform for other in others)]))


class ConfidenceMeasure(Protocol):
    """How confident the model is of a token. Measures that compare equal give equal scores."""

    def score(self, log_x: LogX, tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        """[N]: larger is more confident; log_x [N, V] is normalized, tokens [N] were drawn from it."""
        ...


@dataclass(frozen=True)
class DrawWithConfidence(MergeableRowFn):
    """Draws a token for each query, and scores it by each measure."""

    draw_tokens: DrawTokens
    """How tokens are drawn."""
    measures: tuple[ConfidenceMeasure, ...]
    """How they are scored."""
    normalized: bool
    """Whether log_x sums to one; otherwise it is normalized first."""

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float64[Tensor, "N k"]:
        """float64 [n, k]: the token, which is NaN where log_x is damaged, and its scores."""
        if not self.normalized:
            log_x = log_x - log_x.logsumexp(-1, keepdim=True)
        token = self.draw_tokens(log_x, indices)
        scores = [measure.score(log_x, token.clamp(min=0)).double() for measure in self.measures]
        return torch.stack([token.double().masked_fill(token < 0, torch.nan), *scores], -1)

    @property
    def batch_key(self) -> Hashable:
        return DrawWithConfidence, self.draw_tokens.batch_key, self.measures, self.normalized

    def merge(self, others: Sequence[DrawWithConfidence], num_queries: Sequence[int]) -> DrawWithConfidence:
        return replace(self, draw_tokens=self.draw_tokens.merge([other.draw_tokens for other in others], num_queries))
