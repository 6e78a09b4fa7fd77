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

from unmask.diffusion.categorical import Choice
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import uniforms
from unmask.diffusion.process import Masking
from unmask.diffusion.times import check_steps, levels
from unmask.sampling.base import (
    Drawn,
    choose,
    remaining_time,
    reversed_process,
    row_uniforms,
    share,
    start,
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
    choice: Choice = Choice()

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        schedule = reversed_process(denoise, Masking).schedule
        z = start(denoise, canvas)
        visible = levels(schedule, self.steps).flip(0)  # from 0 at t = 1 up to 1 at t = 0
        if not denoise.normalised:
            yield from self._every_step(denoise, z, canvas.seeds, visible)
            return
        level = uniforms(canvas.seeds, z.shape[1])
        step = torch.searchsorted(visible, level, right=True).clamp(max=self.steps)
        time = 1 - (step - 1).double() / self.steps
        yield from reveal(denoise, z, canvas.seeds, step.to(z.device), time.to(z.device), self.choice)

    def _every_step(
        self, denoise: Denoise, z: Tokens, seeds: tuple[int, ...], visible: Tensor
    ) -> Iterator[Tokens]:
        """Every step at every masked position; a timeless network is asked anew only where z has changed."""
        mask, answers = denoise.vocab.mask, dict[int, Tensor]()
        for step in range(1, self.steps + 1):
            active = (z == mask).any(1).nonzero()[:, 0]
            if len(active) == 0:
                return
            rows = z[active] == mask
            stale = torch.tensor([not denoise.timeless or b not in answers for b in active.tolist()])
            if stale.any():
                t = torch.full((int(stale.sum()), 1), 1 - (step - 1) / self.steps, device=z.device)
                lines = denoise(z[active[stale]], t, rows[stale], which=active[stale])
                owner = active[stale].repeat_interleave(rows[stale].sum(1))
                answers.update({b: lines[owner == b] for b in active[stale].tolist()})
            log_x = torch.cat([answers[b] for b in active.tolist()])
            jump = Masking.reveal(visible[step], visible[step - 1]).expand(len(log_x)).to(z.device)
            token = choose(self.choice, log_x, row_uniforms(seeds, active, step, rows), mask, jump)
            before, z = z, write(z, active, rows, token)
            for b in (z != before).any(1).nonzero()[:, 0].tolist():
                del answers[b]
            yield z


@dataclass(frozen=True)
class FirstHitting:
    """T to infinity: one position after the other, in random order, each at the time it is first hit."""

    choice: Choice = Choice()

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        schedule = reversed_process(denoise, Masking).schedule
        if not denoise.normalised:
            raise ValueError(
                "first-hitting needs a model whose probabilities sum to one (MDLM);"
                " take the sampler ancestral for D3PM and SEDD"
            )
        z = start(denoise, canvas)
        level = uniforms(canvas.seeds, z.shape[1])
        time = schedule.inverse(level)
        order = rank(level.masked_fill((z != denoise.vocab.mask).cpu(), torch.inf))
        yield from reveal(denoise, z, canvas.seeds, order.to(z.device), time.to(z.device), self.choice)


@dataclass(frozen=True)
class RandomOrder:
    """Random order with fixed counts (LLaDA): each step reveals its equal share of a row's holes."""

    steps: int = 128
    choice: Choice = Choice()

    def __post_init__(self) -> None:
        check_steps(self.steps)

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        z = start(denoise, canvas)
        hidden = (z == denoise.vocab.mask).cpu()
        holes = hidden.sum(1)
        order = rank(uniforms(canvas.seeds, z.shape[1]).masked_fill(~hidden, torch.inf))
        steps = min(self.steps, z.shape[1])  # beyond one step for each place nothing changes but memory
        done = share(holes[:, None], steps, torch.arange(steps)).cumsum(1)
        step = torch.searchsorted(done, order, right=True)
        before = torch.cat([torch.zeros_like(done[:, :1]), done], 1).gather(1, step)
        time = remaining_time(denoise, holes[:, None] - before, holes[:, None].clamp(min=1))
        yield from reveal(denoise, z, canvas.seeds, step.to(z.device), time.to(z.device), self.choice)


def rank(keys: Tensor) -> Tensor:
    """[B, L]: each key's place in its row, the smallest first."""
    return keys.argsort(dim=1, stable=True).argsort(dim=1, stable=True)


def write(z: Tokens, active: Tensor, rows: Tensor, tokens: Tensor) -> Tokens:
    """A new canvas with `tokens` [N] at the `rows` [b, L] of its `active` [b] sequences."""
    z = z.clone()
    z[active] = z[active].masked_scatter(rows, tokens)
    return z


def reveal(
    denoise: Denoise, z: Tokens, seeds: tuple[int, ...], step: Tensor, time: Tensor, choice: Choice
) -> Iterator[Tokens]:
    """Reveal each masked position at its own `step` [B, L], the network being told its `time` [B, L].

    A row's positions with one step are written together; a call advances every unfinished row to the
    next step at which something of it is revealed.
    """
    mask = denoise.vocab.mask
    never = torch.iinfo(step.dtype).max
    uniform = uniforms(seeds, z.shape[1], draw=1).to(z.device)
    pending = step.masked_fill(z != mask, never)
    while True:
        following, where = pending.min(1)
        active = (following != never).nonzero()[:, 0]
        if len(active) == 0:
            return
        rows = pending[active] == following[active, None]
        t = time[active].gather(1, where[active, None])
        drawn = Drawn(choice, uniform[active][rows], mask)
        z = write(z, active, rows, denoise(z[active], t, rows, each=drawn, which=active))
        pending = pending.masked_fill(z != mask, never)
        yield z
