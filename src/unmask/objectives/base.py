"""What all objectives share: the draw of noise for a batch, and one formula for masked tokens.

A step that reveals a masked token with probability r costs KL(q(z_s|z_t,x) || p(z_s|z_t)), which in the
language of log_x, S = sum(exp(log_x)), is

    r (-log_x[x])  +  (1 - r) log((1 - r) / (1 - r S))   =   r ( -log_x[x] + penalty(S, r) )

with penalty -> S - 1 as r -> 0. So one line serves MDLM (S = 1: no penalty), D3PM's bracket (S < 1) and
SEDD's score entropy (S free), in T steps and in continuous time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import substream, uniforms
from unmask.diffusion.process import BlockMasking, Masking, Process, UniformNoise
from unmask.diffusion.schedule import AnySchedule, LogLinear, Schedule
from unmask.diffusion.times import (
    AnyTimes,
    Moment,
    UniformTimes,
    continuous_moment,
    counted_moment,
    evened,
    stratified,
)
from unmask.types import Batch, Each, LogX, Vocab


class Objective(ABC):
    """A way to train a network and to read what it then says."""

    @property
    @abstractmethod
    def process(self) -> Process:
        """How text is destroyed."""

    @property
    @abstractmethod
    def normalised(self) -> bool:
        """Whether every line of `read` sums to one."""

    @property
    def softmax(self) -> bool:
        """Whether `read` is a log-softmax over the clean tokens (`subs`)."""
        return False

    @property
    def reads_alpha(self) -> bool:
        """Whether `read` depends on alpha, and so on the time."""
        return False

    @abstractmethod
    def read(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        """log_x [N, V] from logits [N, V]; alpha [N, 1] is the visible share (0 where the row is visible)."""

    @abstractmethod
    def token_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
        """Nats [B, L], zero where not counted; their sum's mean over draws bounds -log p(x) from above.

        The generator must be in the same state on every rank and micro-batch of a step: rows then get
        noise that depends on the step and their global number only.
        """


@dataclass(frozen=True, kw_only=True)
class MaskedObjective(Objective):
    """Continuous-time masked diffusion; `read` makes the difference between its members.

    `exact_counts`: k of a row's n tokens are hidden, k uniform, instead of each by its own coin: the same
    bound from steadier draws, for networks that are not told the time.
    """

    schedule: AnySchedule = LogLinear()
    times: AnyTimes = UniformTimes()
    exact_counts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                "a schedule must be one of unmask.diffusion.schedule's, as in Cosine();"
                f" got {self.schedule!r}"
            )
        if self.exact_counts and self.reads_alpha:
            raise ValueError("exact_counts needs an objective that does not read alpha: MDLM or SEDD")

    @property
    def process(self) -> Masking | BlockMasking:
        return Masking(self.schedule)

    def moment(self, u: Tensor) -> Moment:
        """The moment of noise that u in [0, 1) stands for."""
        return continuous_moment(self.schedule, u)

    def token_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> Tensor:
        return self.timed_nll(denoise, batch, generator)[0]

    def timed_nll(self, denoise: Denoise, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`token_nll`, and the times that were drawn, [B, 1] or [B, L]."""
        u, importance, noise = draw_noise(denoise, batch, self.times, generator)
        moment, noise = self.drawn(denoise, u, noise, batch.counted)
        z = corrupt(Masking(self.schedule), batch, moment.alpha, noise, denoise.vocab)
        return self.charge(denoise, batch, z, moment, importance), moment.t

    def drawn(self, denoise: Denoise, u: Tensor, noise: Tensor, counted: Tensor) -> tuple[Moment, Tensor]:
        """The moments that u [B, 1] stands for, and the noise [B, L] as it is to be compared with alpha."""
        if not self.exact_counts:
            return self.moment(u), noise
        if not denoise.timeless:
            raise ValueError("exact_counts needs a network that is not told the time")
        return counted_moment(self.schedule, u, counted), evened(noise, counted)

    def charge(self, denoise: Denoise, batch: Batch, z: Tensor, moment: Moment, importance: Tensor) -> Tensor:
        """Nats [B, L] of the step at `moment` for the noisy `z`: the network answers at masked rows only."""
        rows = (z == denoise.vocab.mask) & batch.counted
        surprise = Surprise(batch.tokens[rows], at_rows(moment.weight * importance, rows))
        jump = None if moment.jump is None else at_rows(moment.jump, rows)

        def with_penalty(log_x: LogX, part: slice | Tensor) -> Tensor:
            fine = penalty(log_x.exp().sum(-1), None if jump is None else jump[part])
            return surprise(log_x, part) + surprise.weight[part].to(fine) * fine

        price = surprise if self.normalised else with_penalty
        return scatter(self.asked(denoise, batch, z, moment.t, rows, price), rows)

    def asked(
        self, denoise: Denoise, batch: Batch, z: Tensor, t: Tensor, rows: Tensor, price: Each
    ) -> Tensor:
        """What the network is charged [N] at the rows of z."""
        return denoise(z, t, rows, each=price, **batch.context)


@dataclass(frozen=True)
class Surprise:
    """-weight log_x[x]: what is asked of every line, with tokens x [N] and weights [N] of all of them."""

    x: Tensor
    weight: Tensor

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        nats = -log_x.gather(-1, self.x[part, None])[:, 0]
        return self.weight[part].to(nats) * nats

    @classmethod
    def of(cls, x: Tensor) -> Surprise:
        """Every token counts once."""
        return cls(x, torch.ones_like(x, dtype=torch.float32))


def draw_noise(
    denoise: Denoise, batch: Batch, times: AnyTimes, generator: torch.Generator, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """A checked batch's u in [0, 1) [B, parts], its importance weight, and a uniform for each token [B,
    L]."""
    check_batch(denoise, batch)
    offset = float(torch.rand((), generator=generator, dtype=torch.float64))
    seed = int(torch.randint(2**62, (), generator=generator))
    rows, length = batch.tokens.shape
    seeds = [substream(seed, batch.first_row + row) for row in range(rows)]
    u, importance = times.warp(stratified(batch, offset, parts))
    noise = uniforms(seeds, length)
    device = batch.tokens.device
    return u.to(device), importance.to(device), noise.to(device)


def check_batch(denoise: Denoise, batch: Batch) -> None:
    """Refuse ids that are no data; padding may be any id."""
    denoise.vocab.check(batch.tokens)
    denoise.vocab.check(batch.tokens if batch.valid is None else batch.tokens[batch.valid], data=True)


def corrupt(
    process: Masking | UniformNoise, batch: Batch, alpha: Tensor, noise: Tensor, vocab: Vocab
) -> Tensor:
    """z_t ~ q(. | x) on the counted tokens; the others stay."""
    noisy = process.corrupt(batch.tokens, alpha, noise, vocab)
    return torch.where(batch.counted, noisy, batch.tokens)


def penalty(total: Tensor, jump: Tensor | None) -> Tensor:
    """((1 - r)/r) log((1 - r)/(1 - r S)): S - 1 for an infinitesimal step, 0 for a certain one (r = 1)."""
    if jump is None:
        return total - 1
    small, certain = jump < 1e-9, jump >= 1
    r, wide = torch.where(small | certain, 0.5, jump).double(), total.double()
    between = (1 - r) / r * (torch.log1p(-r) - torch.log1p(-r * wide))
    return torch.where(certain, 0, torch.where(small, wide - 1, between)).to(total)


def precise(logits: Tensor) -> Tensor:
    """At least float32: probabilities of rare tokens do not survive in 16 bits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def at_rows(values: Tensor, rows: Tensor) -> Tensor:
    """The values [B, 1] or [B, L] of the asked rows: [N]."""
    return values.expand(rows.shape)[rows]


def scatter(values: Tensor, rows: Tensor) -> Tensor:
    """[B, L] with `values` [N] at the rows and zero elsewhere."""
    return values.new_zeros(rows.shape).masked_scatter(rows, values)
