"""GenMD4 (arXiv 2406.04329): masked diffusion whose tokens learn when they are masked.

Each token v has a schedule alpha_v(t) = 1 - (1 - eps) t^(w_v) with a learned power w_v. The network predicts
mu = softmax over the clean tokens, and a reverse step unmasks v with probability r_v mu_v. The KL of a step is that of
`objectives/base.py` with r = r_x and S = sum(r_v mu_v)/r_x. In continuous time, where rates are w_v/t, a masked token x
costs

    (1/t) [ w_x (-log mu_x) + sum_v (w_v - w_x) mu_v ]

The noisy text z depends on w too, so the gradient of the expected loss has a score term. With two draws z1, z2 at the
same t, each is the baseline of the other (leave-one-out):

    (l1 + l2)/2 + 1/2 stopgrad(l1 - l2) (log q(z1 | x) - log q(z2 | x))

has the gradient of the bound on average. The value of the loss here is (l1 + l2)/2, the bound: the score term has a
gradient and no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import MAX_STEPS, validate_steps
from unmask.diffusion.process import PerTokenMasking
from unmask.diffusion.time_sampling import UniformTimes
from unmask.diffusion.token_schedule import TokenNoiseLevel, TokenPowers
from unmask.objectives.base import Objective, sample_noise
from unmask.objectives.mdlm import subs
from unmask.ops.packing import scatter_rows
from unmask.types import Batch, LogX, Queries, Vocab

_NUM_DESCRIBED = 8
"""Tokens that a card lists as revealed first, and last."""


class _LearnedPowers(nn.Module):
    """w = softplus(raw) of each token, 1 at first."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((vocab.size,), math.log(math.expm1(1))))

    def forward(self) -> Float[Tensor, " V"]:
        """w [V]."""
        return F.softplus(_whole_parameter(self.raw))


@dataclass(frozen=True, kw_only=True)
class GenMD4(Objective):
    """A schedule for each token, learned with the network; a step costs two predictions of every sequence."""

    eps: float = 1e-4
    """The fraction of tokens that is still visible at t = 1."""
    t1: float = 1e-3
    """The time below which all tokens are unmasked at one rate."""
    steps: int | None = None
    """The number of steps T; None for continuous time."""
    published_reconstruction: bool = False
    """Report the published figure, to compare with it: the mean (not the integral, which is 1 - t1 times as large)
    over times from t1 to 1, and tokens that are masked at t1 drawn from the schedules alone, with probabilities
    proportional to t1^w. No sampler here does that."""

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps, the share of tokens that stays visible at t = 1, must be in [0, 1); got {self.eps}")
        if not 0 < self.t1 < 1:
            raise ValueError(f"t1, the time below which all tokens have one rate, must be in (0, 1); got {self.t1}")
        if self.steps is not None:
            validate_steps(self.steps)
            if self.published_reconstruction:
                raise ValueError("published_reconstruction is for continuous time; leave steps out")

    @property
    def process(self) -> PerTokenMasking:
        return PerTokenMasking()

    def new_parameters(self, vocab: Vocab) -> nn.Module:
        return _LearnedPowers(vocab)

    def process_with(self, parameters: nn.Module | None) -> PerTokenMasking:
        if parameters is None:
            return self.process
        return PerTokenMasking(lambda: TokenPowers(parameters(), self.eps, self.t1))

    def describe_parameters(
        self, parameters: nn.Module | None, vocab: Vocab, spell: Callable[[int], str]
    ) -> dict[str, str]:
        """The tokens of the largest and of the smallest powers."""
        assert parameters is not None
        power, order = (values.tolist() for values in parameters().detach().sort(descending=True, stable=True))
        listed = [f"{spell(v)} ({w:.3g})" for w, v in zip(power, order, strict=True) if v != vocab.mask_id]
        count = min(_NUM_DESCRIBED, len(listed) // 2)
        return {"revealed first (w)": ", ".join(listed[:count]), "revealed last (w)": ", ".join(listed[-count:])}

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def in_steps(self, steps: int | None) -> GenMD4:
        return replace(self, steps=steps or MAX_STEPS, published_reconstruction=False)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        noise = [sample_noise(denoiser, batch, UniformTimes(), generator) for _ in range(2)]
        schedule = _schedule_of(denoiser)
        device = batch.tokens.device  # where the schedules are, on which the masks depend
        level = self.noise_level(schedule, noise[0].u.to(device))
        uniform = torch.stack([each.uniform for each in noise]).to(device)
        return self.two_draw_nll(denoiser, batch, schedule, level, uniform)

    def noise_level(self, schedule: TokenPowers, u: Float64[Tensor, "B 1"]) -> TokenNoiseLevel:
        """The noise level that u in [0, 1) stands for."""
        if self.steps is not None:
            return schedule.discrete_level(u, self.steps)
        return schedule.published_level(u) if self.published_reconstruction else schedule.continuous_level(u)

    def two_draw_nll(
        self,
        denoiser: DenoiserLike,
        batch: Batch,
        schedule: TokenPowers,
        level: TokenNoiseLevel,
        uniform: Float64[Tensor, "draws B L"],
    ) -> Float[Tensor, "B L"]:
        """The mean nats [B, L] of two draws of z, with the score term in its gradient.

        A token is masked where its uniform number is below P(masked).
        """
        x, loss_mask = batch.tokens, batch.loss_mask
        log_p = level.log_mask_prob(schedule.power[x])
        masked = (uniform < log_p.detach().exp()) & loss_mask
        nll = self._masked_nll(denoiser, batch, schedule, level, masked)
        mean = nll.sum(0)
        if log_p.requires_grad:
            score = _score_term(len(uniform) * nll.detach(), log_p, masked, loss_mask).to(mean)
            mean = mean + (score - score.detach())
        if self.published_reconstruction:
            mean = mean + torch.where(loss_mask, _reconstruction_nll(schedule, x, denoiser.vocab), 0).to(mean)
        return mean

    def _masked_nll(
        self,
        denoiser: DenoiserLike,
        batch: Batch,
        schedule: TokenPowers,
        level: TokenNoiseLevel,
        masked: Bool[Tensor, "draws B L"],
    ) -> Float[Tensor, "draws B L"]:
        """The share of the masked tokens of each draw in the mean nats, zero elsewhere: one call for all draws.

        (Shares, because a division afterwards would hide from `chunked_head` that all rows have one gradient.)
        Masks depend on learned schedules, so unlike those of other objectives they are read from the device.
        """
        draws = len(masked)
        z = torch.where(masked, denoiser.vocab.mask_id, batch.tokens).flatten(0, 1)
        queries = Queries.from_host(masked.flatten(0, 1).cpu().numpy(), masked.device)

        def gathered(values: Tensor) -> Tensor:
            return queries.gather(values.repeat(draws, 1))

        log_stay = None if level.log_stay is None else tuple(gathered(values) for values in level.log_stay)
        row_fn = _TokenRateNLL(
            gathered(batch.tokens), schedule.power, gathered(level.weight) / draws, gathered(level.own_rates), log_stay
        )
        nll = denoiser(z, level.t.repeat(draws, 1), queries, _repeat_context(batch.context, draws), row_fn=row_fn)
        return scatter_rows(nll, queries).view(masked.shape)


def _repeat_context(context: Context, draws: int) -> Context:
    """The context of `draws` copies of the sequences, one after another."""
    valid, document_ids, on_host = context.valid, context.document_ids, context.valid_on_host
    return replace(
        context,
        valid=None if valid is None else valid.repeat(draws, 1),
        document_ids=None if document_ids is None else document_ids.repeat(draws, 1),
        valid_on_host=None if on_host is None else np.tile(on_host, (draws, 1)),
    )


@dataclass(frozen=True)
class _TokenRateNLL:
    """The row function weight (w_x (-log mu_x) + sum_v (w_v - w_x) mu_v), and its counterpart in T steps."""

    x: Int[Tensor, " N"]
    power: Float[Tensor, " V"]
    weight: Float64[Tensor, " N"]
    own_rates: Bool[Tensor, " N"]
    log_stay: tuple[Tensor, ...] | None
    """In T steps: P(v stays masked) = exp(log_stay[0] + w_v log_stay[1]), each [N]."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What the values depend on beside log_x."""
        return (self.power,)

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> _TokenRateNLL:
        """The same with other parameters."""
        return replace(self, power=parameters[0])

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float[Tensor, " N"]:
        x, weight = self.x[indices], self.weight[indices].to(log_x)
        nll = -log_x.gather(-1, x[:, None])[:, 0]
        power = self.power.to(log_x)
        if self.log_stay is not None:
            scale, log_t = (values[indices] for values in self.log_stay)
            return weight * _step_kl(nll, log_x.exp(), power, x, scale, log_t)
        mu = log_x.exp()
        # Sums of equal terms, so that nothing is left of their difference where all powers are equal.
        difference = mu @ torch.stack([power, torch.ones_like(power)], 1)
        own = power[x] * nll + difference[:, 0] - power[x] * difference[:, 1]
        return weight * torch.where(self.own_rates[indices], own, nll)


def _step_kl(
    nll: Float[Tensor, " N"],
    mu: Float[Tensor, "N V"],
    power: Float[Tensor, " V"],
    x: Int[Tensor, " N"],
    log_scale: Float64[Tensor, " N"],
    log_t: Float64[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """r_x (-log mu_x) + (1 - r_x) log((1 - r_x)/(1 - sum_v r_v mu_v)), where 1 - r_v = exp(log_scale + w_v log_t).

    The last fraction is 1/(1 + sum_v mu_v (exp((w_v - w_x) log_t) - 1)): small differences stay exact in float64.
    """
    w = power.double()
    log_stay = log_scale + w[x] * log_t
    excess = (mu.double() * torch.expm1((w - w[x, None]) * log_t[:, None])).sum(-1)
    kl = -torch.expm1(log_stay) * nll.double() - log_stay.exp() * torch.log1p(excess)
    return kl.to(nll)


def _whole_parameter(parameter: Tensor) -> Tensor:
    """A parameter that is used outside of the call of its model, as a whole where FSDP has sharded it.

    Its gradient is then averaged over the ranks, as FSDP averages those of all others. All ranks must call this.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(parameter, DTensor)
    world_size = parameter.device_mesh.size()
    gathered: Any = parameter.full_tensor(grad_placements=[Partial()])  # the ranks' gradients are summed
    if gathered.requires_grad:
        gathered.register_hook(lambda grad: grad / world_size)
    whole: Tensor = gathered
    return whole


def _schedule_of(denoiser: DenoiserLike) -> TokenPowers:
    process = denoiser.process
    if not isinstance(process, PerTokenMasking):
        raise ValueError(f"GenMD4 needs a model with learned schedules; this one is of {process.title}")
    return process.schedule


def _score_term(
    nll: Float[Tensor, "draws B L"],
    log_p: Float64[Tensor, "B L"],
    masked: Bool[Tensor, "draws B L"],
    loss_mask: Bool[Tensor, "B L"],
) -> Float64[Tensor, "B L"]:
    """1/2 (l1 - l2) (log q(z1 | x) - log q(z2 | x)), as terms [B, L] of the tokens."""
    log_visible = torch.log(-torch.expm1(torch.where(masked.all(0) | ~loss_mask, -1, log_p)))  # never log 0
    log_q = torch.where(masked, log_p, torch.where(loss_mask, log_visible, 0))
    first, second = nll.double().sum(-1, keepdim=True)
    score: Tensor = (first - second) / 2 * (log_q[0] - log_q[1])
    return score


def _reconstruction_nll(schedule: TokenPowers, x: Int[Tensor, "B L"], vocab: Vocab) -> Float64[Tensor, "B L"]:
    """(1 - eps) t1^(w_x) (-log(t1^(w_x)/sum_v t1^(w_v))): the published term for what is still masked at t1."""
    log_p = schedule.power.double() * math.log(schedule.t1)
    clean = torch.arange(vocab.size, device=x.device) != vocab.mask_id
    log_prior = log_p - log_p[clean].logsumexp(0)
    return ((1 - schedule.eps) * log_p.exp() * -log_prior)[x]
