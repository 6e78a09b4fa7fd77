"""The law of a sampler: the probability that it writes a given text.

Where the positions that a step writes follow from what the network predicts for them, and not from the tokens that are
drawn there, a sampler that is given the tokens of a text x instead of drawing them goes through the very states z_1,
z_2, ... in which it would write x, and

    p(x) = product over steps k and positions l written in step k of  p(x_l | z_k)

exactly: over all texts, this sums to one. With one position a step it is the chain rule of the network in an order that
depends on the text (DUEL, arXiv 2603.01367); with several it is what parallel decoding does, whatever it loses.

Where the positions follow from noise (random orders, the steps of ancestral sampling), the product is p(x | noise) and
the law is its mean over the noise, which is bounded from both sides. With K independent draws

    -log p(x) <= E[-log (1/K) sum over k of p(x | noise_k)]                    importance weighting, decreasing in K
     log p(x) <= E[log psi + p(x | noise)/psi - 1]   for any psi > 0           a tangent of the logarithm (TUBE)

The second is an equation at psi = p(x); here psi is the mean of other draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.sampling._row_fns import DrawTokens, DrawWithConfidence
from unmask.sampling.base import Sampler
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Positions, Queries, RowFn, Times, Tokens


def text_nats(
    denoiser: DenoiserLike,
    sampler: Sampler,
    tokens: Tokens,
    seeds: Sequence[int],
    written: Bool[Tensor, "B L"] | None = None,
) -> Float64[Tensor, "B L"]:
    """-log p of each token of texts [B, L] as the sampler writes them, with the noise of `seeds`; their sum over a text
    is -log p(x | noise).

    `written` [B, L] are the positions that it writes; the others are given, and cost nothing. ValueError for a sampler
    whose law is not known.
    """
    if sampler.order_follows == "tokens":
        raise ValueError(
            f"the probability of a text under {type(sampler).__name__} cannot be computed, as the tokens that it draws"
            " decide where it writes, or are written again: take an order that does not look at them, such as"
            " Confidence(measure='best-probability'), margin or entropy"
        )
    if sampler.end_ids:  # what follows the end of a text is text here
        sampler = replace(cast("Any", sampler), end_ids=())
    written = torch.ones_like(tokens, dtype=torch.bool) if written is None else written
    given = _GivenText(denoiser, tokens)
    canvas = tokens.masked_fill(written, denoiser.vocab.mask_id)
    for _ in sampler.run(given, Canvas(canvas, tuple(seeds))):
        pass
    return given.nats.where(written, 0)


class _GivenText(DenoiserWrapper):
    """A denoiser for whose queries the tokens of a text are drawn; it keeps their nats, those of the last query."""

    def __init__(self, denoiser: DenoiserLike, tokens: Tokens) -> None:
        super().__init__(denoiser)
        self.tokens, self.nats = tokens, torch.zeros_like(tokens, dtype=torch.float64)

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
        if not isinstance(row_fn, DrawTokens | DrawWithConfidence):
            raise ValueError(
                "the probability of a text is not known under this sampler, for a model whose probabilities do not sum"
                " to one (D3PM, SEDD) or whose tokens have schedules of their own: take another order"
            )
        queries, _ = Queries.resolve(positions, z.shape)
        sequence = queries[0] if sequence_ids is None else sequence_ids[queries[0]]
        where = sequence, queries[1] + (0 if context.cache is None else context.cache.start)
        values = self.denoiser(
            z,
            t,
            queries,
            context,
            row_fn=_GivenTokens(row_fn, self.tokens[where]),
            sequence_ids=sequence_ids,
        )
        self.nats[where] = values[:, 0]
        return values[:, 1].long() if isinstance(row_fn, DrawTokens) else values[:, 1:]


@dataclass(frozen=True)
class _GivenTokens:
    """A sampler's row function with given tokens [N] in place of those it would draw."""

    row_fn: DrawTokens | DrawWithConfidence
    tokens: Int[Tensor, " N"]

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float64[Tensor, "N k"]:
        """float64 [n, 2 + number of measures]: the nats of each token, the token, and its scores."""
        tokens, row_fn = self.tokens[indices], self.row_fn
        draw, scores = row_fn.draw_tokens if isinstance(row_fn, DrawWithConfidence) else row_fn, list[Tensor]()
        if isinstance(row_fn, DrawWithConfidence):
            log_x = log_x if row_fn.normalized else log_x - log_x.logsumexp(-1, keepdim=True)
            scores = [measure.score(log_x, tokens).double() for measure in row_fn.measures]
        weights = draw.params.probabilities(log_x)
        nats = weights.sum(-1, dtype=torch.float64).log() - weights.gather(-1, tokens[:, None])[:, 0].double().log()
        return torch.stack([nats, tokens.double(), *scores], -1)


@dataclass(frozen=True)
class LawBounds:
    """What K draws of the noise say of -log p(x), in nats, summed over independent parts (texts, or their blocks)."""

    mean: float
    """The mean of -log p(x | noise): the bound of one draw, and masked diffusion's own where orders are random."""
    mean_variance: float
    upper: float
    """The importance-weighted bound of all K draws: -log p(x) is at most this, on average over the noise."""
    upper_variance: float
    """By the jackknife over the draws."""
    lower: float
    """-log p(x) is at least this, on average over the noise. It may be minus infinity."""
    lower_variance: float
    effective_draws: float
    """Kish's effective number of draws, the smallest of the parts': where it is near one, so few draws carry the whole
    mean that the errors, and the lower end most of all, are not to be trusted."""


def law_bounds(nats: Float64[Tensor, "K parts"]) -> LawBounds:
    """Bounds of -log p from both sides, from -log p(x | noise) of K draws for each part of the text.

    Half of the draws are psi of the other half, and the other way round.
    """
    draws = len(nats)
    if draws < 4:
        raise ValueError(f"bounds from both sides need at least 4 draws; got {draws}")
    log_p = -nats
    upper = math.log(draws) - log_p.logsumexp(0)
    without = torch.stack([log_p[torch.arange(draws) != k].logsumexp(0) for k in range(draws)])
    jackknife = (math.log(draws - 1) - without).var(0, correction=0) * (draws - 1)
    lower, lower_variance = _tangent(log_p[0::2], log_p[1::2])
    other, other_variance = _tangent(log_p[1::2], log_p[0::2])
    weights = (log_p - log_p.amax(0)).exp()
    effective = weights.sum(0) ** 2 / (weights**2).sum(0)
    return LawBounds(
        mean=float(nats.mean(0).sum()),
        mean_variance=float((nats.var(0) / draws).sum()),
        upper=float(upper.sum()),
        upper_variance=float(jackknife.sum()),
        lower=float((lower + other).sum()) / 2,
        lower_variance=float((lower_variance + other_variance).sum()) / 2,  # at least: the halves are dependent
        effective_draws=float(effective.min()),
    )


def _tangent(
    log_p: Float64[Tensor, "draws parts"], others: Float64[Tensor, "draws parts"]
) -> tuple[Float64[Tensor, " parts"], Float64[Tensor, " parts"]]:
    """-(log psi + p/psi - 1) of each part with its variance, psi being the mean of the others."""
    log_psi = others.logsumexp(0) - math.log(len(others))
    ratio = (log_p - log_psi).exp()
    return 1 - log_psi - ratio.mean(0), ratio.var(0) / len(ratio)
