"""What is asked of log_x line by line, and its gradient with respect to the logits.

The question that almost every loss asks, what a line says of one token, has a gradient in closed form where
log_x is a log-softmax: it is then computed in place, and [N, V] is written three times instead of nine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.backbones.head import Priced
from unmask.objectives.base import Objective, Surprise, precise
from unmask.types import Each, LogX, Vocab

WIDE_AT_ONCE = 1 << 21
"""Logits that are turned into probabilities at a time."""


@dataclass(frozen=True)
class Reading:
    """`each` of log_x = read(logits, alpha), as the head asks for it."""

    objective: Objective
    alpha: Tensor
    vocab: Vocab
    each: Each

    def __call__(self, logits: Tensor, part: slice) -> Tensor:
        return self.each(log_x(self.objective, logits, self.alpha[part], self.vocab), part)

    def priced(self, logits: Tensor, part: slice) -> Priced:
        """d(-log softmax(y)[x])/dy = softmax(y) - onehot(x); anything else is left to autograd."""
        if self.objective.softmax and isinstance(self.each, Surprise):
            x, scale = self.each.x[part, None], self.each.weight[part]
            nats = torch.cat([self._walked(*few) for few in zip(_few(logits), _few(x, logits), strict=True)])
            scale = scale.to(nats)
            return Priced(scale * nats, logits, scale)
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            said = self(leaf, part)
        (slope,) = torch.autograd.grad(said, leaf, torch.ones_like(said))
        return Priced(said.detach(), slope, torch.ones_like(said))

    def _walked(self, logits: Tensor, x: Tensor) -> Tensor:
        """Nats [n] of the tokens x [n, 1], while softmax(logits) - onehot(x) is written over the logits.

        log sum exp(y) = max y - log max softmax(y): a softmax and two maxima are less than a log-softmax and
        its exponential.
        """
        wide = _wide(logits, self.vocab)
        most, own = wide.amax(-1), wide.gather(-1, x)[:, 0]
        slope = torch.softmax(wide, -1, out=wide)
        nats = most - slope.amax(-1).log() - own
        slope.scatter_add_(-1, x, torch.full_like(x, -1, dtype=slope.dtype))
        if slope.dtype != logits.dtype:
            logits.copy_(slope)
        return nats


def _few(lines: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """So many at a time that float32 logits of theirs, as many as in a line of `like`, are in the cache."""
    size = max(1, WIDE_AT_ONCE // (lines if like is None else like).shape[1])
    return torch.split(lines, size)


def log_x(objective: Objective, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
    """What the objective reads from logits that nobody else needs: written over them, where it can be."""
    if objective.softmax and not logits.requires_grad:
        return _softmax(logits, vocab)
    return objective.read(logits, alpha, vocab)


def _softmax(logits: Tensor, vocab: Vocab) -> LogX:
    """`subs`, written over the logits."""
    wide = _wide(logits, vocab)
    return torch.log_softmax(wide, -1, out=wide)


def _wide(logits: Tensor, vocab: Vocab) -> Tensor:
    """Written over, if they are precise: without the mask."""
    wide = precise(logits)
    wide[:, vocab.mask] = -torch.inf
    return wide
