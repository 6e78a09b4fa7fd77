"""What is asked of log_x line by line, and its gradient with respect to the logits.

The question that almost every loss asks, what a line says of one token, has a gradient in closed form where
log_x is a log-softmax: it is then computed in place, and [N, V] is written three times instead of nine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.objectives.base import Objective, WeightedNLL, to_float32
from unmask.ops.chunked_head import ValueAndGrad
from unmask.types import LogX, RowFn, Vocab

_MAX_CACHED_LOGITS = 1 << 21
"""Logits that are turned into probabilities at a time."""


@dataclass(frozen=True)
class LogProbRowFn:
    """`each` of log_x = read(logits, alpha), as the head asks for it."""

    objective: Objective
    alpha: Tensor
    vocab: Vocab
    row_fn: RowFn

    def __call__(self, logits: Tensor, indices: slice) -> Tensor:
        return self.row_fn(log_probs_inplace(self.objective, logits, self.alpha[indices], self.vocab), indices)

    def value_and_grad(self, logits: Tensor, indices: slice) -> ValueAndGrad:
        """d(-log softmax(y)[x])/dy = softmax(y) - onehot(x); anything else is left to autograd."""
        if self.objective.is_softmax and isinstance(self.row_fn, WeightedNLL):
            x, scale = self.row_fn.x[indices, None], self.row_fn.weight[indices]
            nats = torch.cat(
                [
                    self._nll_and_grad_(*few)
                    for few in zip(_cache_sized_chunks(logits), _cache_sized_chunks(x, logits), strict=True)
                ]
            )
            scale = scale.to(nats)
            return ValueAndGrad(scale * nats, logits, scale)
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            said = self(leaf, indices)
        (slope,) = torch.autograd.grad(said, leaf, torch.ones_like(said))
        return ValueAndGrad(said.detach(), slope, torch.ones_like(said))

    def _nll_and_grad_(self, logits: Tensor, x: Tensor) -> Tensor:
        """Nats [n] of the tokens x [n, 1], while softmax(logits) - onehot(x) is written over the logits.

        log sum exp(y) = max y - log max softmax(y): a softmax and two maxima are less than a log-softmax and
        its exponential.
        """
        wide = _float32_without_mask(logits, self.vocab)
        most, own = wide.amax(-1), wide.gather(-1, x)[:, 0]
        slope = torch.softmax(wide, -1, out=wide)
        nats = most - slope.amax(-1).log() - own
        slope.scatter_add_(-1, x, torch.full_like(x, -1, dtype=slope.dtype))
        if slope.dtype != logits.dtype:
            logits.copy_(slope)
        return nats


def _cache_sized_chunks(rows: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """So many at a time that float32 logits of theirs, as many as in a line of `like`, are in the cache."""
    size = max(1, _MAX_CACHED_LOGITS // (rows if like is None else like).shape[1])
    return torch.split(rows, size)


def log_probs_inplace(objective: Objective, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
    """What the objective reads from logits that nobody else needs: written over them, where it can be."""
    if objective.is_softmax and not logits.requires_grad:
        return _subs_inplace(logits, vocab)
    return objective.log_probs(logits, alpha, vocab)


def _subs_inplace(logits: Tensor, vocab: Vocab) -> LogX:
    """`subs`, written over the logits."""
    wide = _float32_without_mask(logits, vocab)
    return torch.log_softmax(wide, -1, out=wide)


def _float32_without_mask(logits: Tensor, vocab: Vocab) -> Tensor:
    """Written over, if they are precise: without the mask."""
    wide = to_float32(logits)
    wide[:, vocab.mask_id] = -torch.inf
    return wide
