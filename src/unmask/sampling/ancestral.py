"""Ancestral sampling: from nothing but masks, step by step back to text.

For a normalised model, *when* a position is revealed does not depend on *what* it becomes. So every
position's step is drawn in advance, each row goes straight from one of its own reveals to the next
(rows at different times share a network call), and the network answers only where it is about to write.
The result is distributed exactly as if every step had been taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import Masking
from unmask.sampling.base import (
    DrawTokens,
    init_tokens,
    query_uniform,
    require_process,
    sample_tokens,
    time_from_mask_ratio,
    tokens_per_step,
)
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


@dataclass(frozen=True)
class Ancestral:
    """T steps: at each, a masked position is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t).

    A model whose log_x is free (SEDD: the analytic sampler; D3PM) says itself how likely a reveal is, and
    is asked at every masked position: at every step, or only after a change if its answer is timeless.
    """

    steps: int = 128
    params: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        schedule = require_process(denoiser, Masking).schedule
        z = init_tokens(denoiser, canvas)
        visible = alpha_grid(schedule, self.steps).flip(0)  # from 0 at t = 1 up to 1 at t = 0
        if not denoiser.normalized:
            yield from self._run_unnormalized(denoiser, z, canvas.seeds, visible)
            return
        level = seeded_uniform(canvas.seeds, z.shape[1])
        step = torch.searchsorted(visible, level, right=True).clamp(max=self.steps)
        time = 1 - (step - 1).double() / self.steps
        yield from _unmask_at_steps(denoiser, z, canvas.seeds, step.to(z.device), time.to(z.device), self.params)

    def _run_unnormalized(
        self, denoiser: DenoiserLike, z: Tokens, seeds: tuple[int, ...], alphas: Tensor
    ) -> Iterator[Tokens]:
        """Every step at every masked position; a timeless network is asked anew only where z has changed."""
        mask, answers = denoiser.vocab.mask_id, dict[int, Tensor]()
        for step in range(1, self.steps + 1):
            active = (z == mask).any(1).nonzero()[:, 0]
            if len(active) == 0:
                return
            rows = z[active] == mask
            stale = torch.tensor([not denoiser.time_independent or b not in answers for b in active.tolist()])
            if stale.any():
                t = torch.full((int(stale.sum()), 1), 1 - (step - 1) / self.steps, device=z.device)
                lines = denoiser(z[active[stale]], t, rows[stale], sequence_ids=active[stale])
                owner = active[stale].repeat_interleave(rows[stale].sum(1))
                answers.update({b: lines[owner == b] for b in active[stale].tolist()})
            log_x = torch.cat([answers[b] for b in active.tolist()])
            jump = Masking.unmask_prob(alphas[step], alphas[step - 1]).expand(len(log_x)).to(z.device)
            token = sample_tokens(self.params, log_x, query_uniform(seeds, active, step, rows), mask, jump)
            before, z = z, scatter_tokens(z, active, rows, token)
            for b in (z != before).any(1).nonzero()[:, 0].tolist():
                del answers[b]
            yield z


@dataclass(frozen=True)
class FirstHitting:
    """T to infinity: one position after the other, in random order, each at the time it is first hit."""

    params: SamplingParams = SamplingParams()

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        schedule = require_process(denoiser, Masking).schedule
        if not denoiser.normalized:
            raise ValueError(
                "first-hitting needs a model whose probabilities sum to one (MDLM);"
                " take the sampler ancestral for D3PM and SEDD"
            )
        z = init_tokens(denoiser, canvas)
        level = seeded_uniform(canvas.seeds, z.shape[1])
        time = schedule.inverse(level)
        order = ranks(level.masked_fill((z != denoiser.vocab.mask_id).cpu(), torch.inf))
        yield from _unmask_at_steps(denoiser, z, canvas.seeds, order.to(z.device), time.to(z.device), self.params)


@dataclass(frozen=True)
class RandomOrder:
    """Random order with fixed counts (LLaDA): each step reveals its equal share of a row's holes."""

    steps: int = 128
    params: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        z = init_tokens(denoiser, canvas)
        hidden = (z == denoiser.vocab.mask_id).cpu()
        holes = hidden.sum(1)
        order = ranks(seeded_uniform(canvas.seeds, z.shape[1]).masked_fill(~hidden, torch.inf))
        steps = min(self.steps, z.shape[1])  # beyond one step for each place nothing changes but memory
        done = tokens_per_step(holes[:, None], steps, torch.arange(steps)).cumsum(1)
        step = torch.searchsorted(done, order, right=True)
        before = torch.cat([torch.zeros_like(done[:, :1]), done], 1).gather(1, step)
        time = time_from_mask_ratio(denoiser, holes[:, None] - before, holes[:, None].clamp(min=1))
        yield from _unmask_at_steps(denoiser, z, canvas.seeds, step.to(z.device), time.to(z.device), self.params)


def ranks(keys: Tensor) -> Tensor:
    """[B, L]: each key's place in its row, the smallest first."""
    return keys.argsort(dim=1, stable=True).argsort(dim=1, stable=True)


def scatter_tokens(z: Tokens, active: Tensor, positions: Tensor, tokens: Tensor) -> Tokens:
    """A new canvas with `tokens` [N] at the `rows` [b, L] of its `active` [b] sequences."""
    z = z.clone()
    z[active] = z[active].masked_scatter(positions, tokens)
    return z


def _unmask_at_steps(
    denoiser: DenoiserLike,
    z: Tokens,
    seeds: tuple[int, ...],
    step: Tensor,
    time: Tensor,
    params: SamplingParams,
) -> Iterator[Tokens]:
    """Reveal each masked position at its own `step` [B, L], the network being told its `time` [B, L].

    A row's positions with one step are written together; a call advances every unfinished row to the
    next step at which something of it is revealed.
    """
    mask = denoiser.vocab.mask_id
    never = torch.iinfo(step.dtype).max
    uniform = seeded_uniform(seeds, z.shape[1], draw=1).to(z.device)
    pending = step.masked_fill(z != mask, never)
    while True:
        following, where = pending.min(1)
        active = (following != never).nonzero()[:, 0]
        if len(active) == 0:
            return
        rows = pending[active] == following[active, None]
        t = time[active].gather(1, where[active, None])
        drawn = DrawTokens(params, uniform[active][rows], mask)
        z = scatter_tokens(z, active, rows, denoiser(z[active], t, rows, row_fn=drawn, sequence_ids=active))
        pending = pending.masked_fill(z != mask, never)
        yield z
