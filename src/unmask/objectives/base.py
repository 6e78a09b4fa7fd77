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
from typing import Self

import torch
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import derive_seed, seeded_uniform
from unmask.diffusion.noise_level import NoiseLevel, continuous_level, fixed_count_level, rank_uniform
from unmask.diffusion.process import BlockMasking, Masking, Process, UniformNoise
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, UniformTimes, stratified_uniform
from unmask.ops.chunked_head import WeightedNLL
from unmask.types import Batch, LogX, RowFn, Vocab


class Objective(ABC):
    """A way to train a network and to read what it then says."""

    @classmethod
    def recommended(cls) -> Self:
        """The settings that `unmask train --objective NAME` takes."""
        return cls()

    @property
    @abstractmethod
    def process(self) -> Process:
        """How text is destroyed."""

    @property
    @abstractmethod
    def normalized(self) -> bool:
        """Whether every line of `read` sums to one."""

    @property
    def is_softmax(self) -> bool:
        """Whether `read` is a log-softmax over the clean tokens (`subs`)."""
        return False

    @property
    def depends_on_alpha(self) -> bool:
        """Whether `read` depends on alpha, and so on the time."""
        return False

    @abstractmethod
    def log_probs(self, logits: Tensor, alpha: Tensor, vocab: Vocab) -> LogX:
        """log_x [N, V] from logits [N, V]; alpha [N, 1] is the visible share (0 where the row is visible)."""

    @abstractmethod
    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        """Nats [B, L], zero where not counted; their sum's mean over draws bounds -log p(x) from above.

        The generator must be in the same state on every rank and micro-batch of a step: rows then get
        noise that depends on the step and their global number only.
        """


@dataclass(frozen=True, kw_only=True)
class MaskedObjective(Objective):
    """Continuous-time masked diffusion; `read` makes the difference between its members.

    `exact_mask_counts`: k of a row's n tokens are hidden, k uniform, instead of each by its own coin: the same
    bound from steadier draws, for networks that are not told the time.
    """

    schedule: Schedule = LogLinear()
    times: AnyTimes = UniformTimes()
    exact_mask_counts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f"a schedule must be one of unmask.diffusion.schedule's, as in Cosine(); got {self.schedule!r}"
            )
        if self.exact_mask_counts and self.depends_on_alpha:
            raise ValueError("exact_mask_counts needs an objective that does not read alpha: MDLM or SEDD")

    @property
    def process(self) -> Masking | BlockMasking:
        return Masking(self.schedule)

    def noise_level(self, u: Tensor) -> NoiseLevel:
        """The moment of noise that u in [0, 1) stands for."""
        return continuous_level(self.schedule, u)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        return self.nll_and_time(denoiser, batch, generator)[0]

    def nll_and_time(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`token_nll`, and the times that were drawn, [B, 1] or [B, L]."""
        u, importance, noise = sample_noise(denoiser, batch, self.times, generator)
        moment, noise = self.sample_level(denoiser, u, noise, batch.loss_mask)
        z = corrupt_batch(Masking(self.schedule), batch, moment.alpha, noise, denoiser.vocab)
        return self.weighted_nll(denoiser, batch, z, moment, importance), moment.t

    def sample_level(
        self, denoiser: DenoiserLike, u: Tensor, noise: Tensor, loss_mask: Tensor
    ) -> tuple[NoiseLevel, Tensor]:
        """The moments that u [B, 1] stands for, and the noise [B, L] as it is to be compared with alpha."""
        if not self.exact_mask_counts:
            return self.noise_level(u), noise
        if not denoiser.time_independent:
            raise ValueError("exact_mask_counts needs a network that is not told the time")
        return fixed_count_level(self.schedule, u, loss_mask), rank_uniform(noise, loss_mask)

    def weighted_nll(
        self, denoiser: DenoiserLike, batch: Batch, z: Tensor, level: NoiseLevel, importance: Tensor
    ) -> Tensor:
        """Nats [B, L] of the step at `moment` for the noisy `z`: the network answers at masked rows only."""
        rows = (z == denoiser.vocab.mask_id) & batch.loss_mask
        surprise = WeightedNLL(batch.tokens[rows], gather_positions(level.weight * importance, rows))
        jump = None if level.unmask_prob is None else gather_positions(level.unmask_prob, rows)

        def with_penalty(log_x: LogX, indices: slice | Tensor) -> Tensor:
            fine = _normalization_penalty(log_x.exp().sum(-1), None if jump is None else jump[indices])
            return surprise(log_x, indices) + surprise.weight[indices].to(fine) * fine

        price = surprise if self.normalized else with_penalty
        return scatter_positions(self.query(denoiser, batch, z, level.t, rows, price), rows)

    def query(
        self, denoiser: DenoiserLike, batch: Batch, z: Tensor, t: Tensor, positions: Tensor, row_fn: RowFn
    ) -> Tensor:
        """What the network is charged [N] at the rows of z."""
        return denoiser(z, t, positions, batch.context, row_fn=row_fn)


def sample_noise(
    denoiser: DenoiserLike, batch: Batch, times: AnyTimes, generator: torch.Generator, num_blocks: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """A checked batch's u in [0, 1) [B, parts], its importance weight, and a uniform for each token [B,
    L]."""
    validate_batch(denoiser, batch)
    draws, seeds = [], []
    for part, part_generator in batch.split_by_noise(generator):
        offset = float(torch.rand((), generator=part_generator, dtype=torch.float64))
        seed = int(torch.randint(2**62, (), generator=part_generator))
        draws.append(stratified_uniform(part, offset, num_blocks))
        seeds += [derive_seed(seed, part.row_offset + row) for row in range(len(part.tokens))]
    u, importance = times.importance_sample(torch.cat(draws))
    noise = seeded_uniform(seeds, batch.tokens.shape[1])
    device = batch.tokens.device
    return u.to(device), importance.to(device), noise.to(device)


def validate_batch(denoiser: DenoiserLike, batch: Batch) -> None:
    """Refuse ids that are no data; padding may be any id."""
    denoiser.vocab.validate(batch.tokens)
    denoiser.vocab.validate(batch.tokens if batch.valid is None else batch.tokens[batch.valid], clean=True)


def corrupt_batch(process: Masking | UniformNoise, batch: Batch, alpha: Tensor, noise: Tensor, vocab: Vocab) -> Tensor:
    """z_t ~ q(. | x) on the counted tokens; the others stay."""
    noisy = process.corrupt(batch.tokens, alpha, noise, vocab)
    return torch.where(batch.loss_mask, noisy, batch.tokens)


def _normalization_penalty(mass: Tensor, unmask_prob: Tensor | None) -> Tensor:
    """((1 - r)/r) log((1 - r)/(1 - r S)): S - 1 for an infinitesimal step, 0 for a certain one (r = 1)."""
    if unmask_prob is None:
        return mass - 1
    small, certain = unmask_prob < 1e-9, unmask_prob >= 1
    r, wide = torch.where(small | certain, 0.5, unmask_prob).double(), mass.double()
    between = (1 - r) / r * (torch.log1p(-r) - torch.log1p(-r * wide))
    return torch.where(certain, 0, torch.where(small, wide - 1, between)).to(mass)


def gather_positions(values: Tensor, positions: Tensor) -> Tensor:
    """The values [B, 1] or [B, L] of the asked rows: [N]."""
    return values.expand(positions.shape)[positions]


def scatter_positions(values: Tensor, positions: Tensor) -> Tensor:
    """[B, L] with `values` [N] at the rows and zero elsewhere."""
    return values.new_zeros(positions.shape).masked_scatter(positions, values)
