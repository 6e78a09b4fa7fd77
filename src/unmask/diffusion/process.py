"""Forward processes q(z_t | x) and their reverse posteriors q(z_s | z_t, x).

For any noise distribution pi: q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) pi), and with
alpha_{t|s} = alpha_t / alpha_s

    q(z_s | z_t, x)  is proportional to
        [alpha_{t|s} z_t + (1 - alpha_{t|s}) (pi^T z_t) 1] * [alpha_s x + (1 - alpha_s) pi].

Masking puts all of pi on the mask; uniform noise spreads it over the clean tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.diffusion.schedule import AnySchedule, LogLinear
from unmask.types import Tokens, Vocab


def posterior(z: Tensor, x: Tensor, pi: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """q(z_s | z_t, x) [..., V] for z_t and x given as distributions [..., V]; `x` may be a prediction."""
    ratio = alpha_t / alpha_s
    forward = ratio * z + (1 - ratio) * (z * pi).sum(-1, keepdim=True)
    joint = forward * (alpha_s * x + (1 - alpha_s) * pi)
    return joint / joint.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Masking:
    """Each token becomes the mask, independently, and never comes back: pi = mask."""

    schedule: AnySchedule = LogLinear()

    def pi(self, vocab: Vocab) -> Tensor:
        """The distribution that noise draws from."""
        return torch.nn.functional.one_hot(torch.tensor(vocab.mask_id), vocab.size).double()

    def corrupt(self, x: Tokens, alpha: Tensor, uniform: Tensor, vocab: Vocab) -> Tokens:
        """z_t ~ q(. | x): masked where uniform < 1 - alpha."""
        return torch.where(uniform < 1 - alpha, vocab.mask_id, x)

    @staticmethod
    def unmask_prob(alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """P(z_s = x | z_t = mask) = (alpha_s - alpha_t) / (1 - alpha_t)."""
        return (alpha_s - alpha_t) / (1 - alpha_t).clamp(min=torch.finfo(alpha_t.dtype).tiny)


@dataclass(frozen=True)
class UniformNoise:
    """Each token is replaced by a uniformly drawn one: pi = 1/(V - 1) on the clean tokens."""

    schedule: AnySchedule = LogLinear()

    def pi(self, vocab: Vocab) -> Tensor:
        """The distribution that noise draws from."""
        pi = torch.full((vocab.size,), 1 / (vocab.size - 1), dtype=torch.float64)
        pi[vocab.mask_id] = 0
        return pi

    def corrupt(self, x: Tokens, alpha: Tensor, uniform: Tensor, vocab: Vocab) -> Tokens:
        """z_t ~ q(. | x): where uniform < 1 - alpha, the rest of that uniform picks the clean token."""
        share = (uniform / (1 - alpha)).nan_to_num()
        token = (share * (vocab.size - 1)).long().clamp(max=vocab.size - 2)
        return torch.where(uniform < 1 - alpha, token + (token >= vocab.mask_id), x)


@dataclass(frozen=True)
class LeftToRight:
    """No noise at all: a token depends on those before it, and text is written from left to right."""


@dataclass(frozen=True)
class BlockMasking:
    """From left to right in blocks of `block` tokens, by masking within a block: those before it are
    clean."""

    block_size: int
    schedule: AnySchedule = LogLinear()

    @property
    def inner(self) -> Masking:
        """What happens inside a block."""
        return Masking(self.schedule)


Process: TypeAlias = Masking | UniformNoise | LeftToRight | BlockMasking
