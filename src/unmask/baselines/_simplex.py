"""Diffusion of "almost one-hot" logits over the vocabulary, as in SSD-LM (arXiv 2210.17432).

A token w is the vector a(w) = K (2 onehot(w) - 1): +K at the token, -K elsewhere. Its noise is Gaussian,

    a_t = sqrt(abar(t)) a(w) + sqrt(1 - abar(t)) K eps,

and a network predicts w from softmax(a_t). A reverse step projects the predicted distribution back to logits of
+K and -K and adds the noise of the time before. The mask is no token: its column is -inf, so that softmax gives
it nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from unmask.diffusion.categorical import sample_inverse_cdf
from unmask.diffusion.process import Process
from unmask.objectives.mdlm import without_mask
from unmask.types import Tokens, Vocab

_SHIFT = 1e-4
"""s in the cosine schedule."""


def alpha_bar(t: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """abar(t) = f(t)/f(0), f(t) = cos^2((t + s)/(1 + s) pi/2), of times in [0, 1]."""

    def cos2(time: Tensor) -> Tensor:
        return ((time + _SHIFT) / (1 + _SHIFT) * (math.pi / 2)).cos().square()

    t = t.double()
    return cos2(t) / cos2(torch.zeros_like(t))


@dataclass(frozen=True)
class SimplexDiffusion(Process):
    """Blocks from left to right, each by Gaussian diffusion of the logits of its tokens."""

    title = "simplex diffusion"
    default_sampler = "unmask.baselines._ssd_lm:SimplexBlocks"
    is_continuous = True

    tokens_per_block: int = 25
    """Tokens that are diffused together, given all tokens before them."""
    scale: float = 5.0
    """K: the logit of a token, and the standard deviation of pure noise."""

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """sqrt(abar(t)), the factor of a(w)."""
        return alpha_bar(t).sqrt()

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """-log alpha(t)."""
        return -self.alpha(t).log()

    def add_noise(
        self, logits: Float[Tensor, "B n V"], t: Float[Tensor, "B 1"], noise: Float[Tensor, "B n V"], vocab: Vocab
    ) -> Float[Tensor, "B n V"]:
        """a_t = sqrt(abar) logits + sqrt(1 - abar) K noise, with -inf in the mask's column."""
        signal = alpha_bar(t)[..., None]
        noisy = signal.sqrt().to(noise) * logits + (1 - signal).sqrt().to(noise) * (self.scale * noise)
        return without_mask(noisy, vocab)

    def one_hot(self, kept: Bool[Tensor, "*N V"]) -> Float[Tensor, "*N V"]:
        """+K at the tokens that are kept, -K elsewhere."""
        return torch.where(kept, float(self.scale), -float(self.scale))


@dataclass(frozen=True)
class SimplexState:
    """What the network reads: clean tokens [B, c], and after them a noisy block [B, n, V] of logits."""

    tokens: Tokens
    block: Float[Tensor, "B n V"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> torch.Size:
        """[B, c + n], as that of a text."""
        return torch.Size((len(self.tokens), self.tokens.shape[1] + self.block.shape[1]))

    def in_block(self) -> Bool[Tensor, "B L"]:
        """Booleans [B, c + n]: True in the block."""
        mask = torch.zeros(self.shape, dtype=torch.bool, device=self.tokens.device)
        mask[:, self.tokens.shape[1] :] = True
        return mask


def nucleus(log_x: Float[Tensor, "*N V"], top_p: float) -> Bool[Tensor, "*N V"]:
    """The smallest set of the most probable tokens whose mass reaches `top_p`, the one that crosses it included."""
    ordered, where = log_x.softmax(-1).sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter_(-1, where, kept)


def draw_kept(
    log_x: Float[Tensor, "N V"], kept: Bool[Tensor, "N V"], uniform: Float64[Tensor, " N"]
) -> Bool[Tensor, "N V"]:
    """One token of each row, drawn from the renormalized probabilities of those that are kept."""
    token: Int[Tensor, " N"] = sample_inverse_cdf(log_x.double().softmax(-1) * kept, uniform)
    return torch.zeros_like(kept).scatter_(-1, token[:, None], True)
