"""Ancestral sampling of masked diffusion: from all masks, step by step back to text.

Algorithm 1 of MDLM (arXiv 2406.07524, with the caching of its section 4), as `Ancestral.algorithm_1` runs it:

    z <- all masks
    for i = T, ..., 1:                                        t = i/T, s = (i - 1)/T
        log_x <- log x_theta(z, t)                            only if z has changed, where the network ignores t
        for every position l with z[l] = mask:
            z[l] <- Cat(r x_theta[l] + (1 - r) mask),         r = (alpha_s - alpha_t)/(1 - alpha_t)

With a schedule for each token, r is a vector, and a position stays masked with what is left.

The shortcut, which `Ancestral.run` takes where log_x sums to one and all tokens have one schedule: then *when* a
position is unmasked does not depend on *what* it becomes. So the step of every position is drawn in advance, each
sequence goes straight from one of its own unmasking steps to the next (sequences at different times share a network
call), and the network is queried only at the positions that are about to be written. The result has exactly the same
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from unmask.diffusion.categorical import DAMAGED, SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform, seeded_uniform_array
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import Masking, PerTokenMasking
from unmask.sampling._row_fns import DrawTokens
from unmask.sampling._unmasking import (
    ranks,
    scatter_tokens,
    time_from_mask_ratio,
    to_device,
    tokens_per_step,
)
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, NonFiniteError, Queries, Tokens


@dataclass(frozen=True)
class Ancestral(Sampler):
    """T steps: at each, a masked position is unmasked with probability (alpha_s - alpha_t)/(1 - alpha_t)."""

    processes = (Masking, PerTokenMasking)

    steps: int = 128
    """T, the number of steps; more are better and slower."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    @property
    def order_follows(self) -> Literal["noise"]:
        return "noise"

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        process = require_process(denoiser, Masking, PerTokenMasking)
        if not denoiser.normalized or not isinstance(process, Masking):  # SEDD (its analytic sampler), D3PM, GenMD4
            yield from self.algorithm_1(denoiser, canvas)
            return
        z = init_tokens(denoiser, canvas)
        alphas = alpha_grid(process.schedule, self.steps).flip(0)  # from 0 at t = 1 up to 1 at t = 0
        uniform = seeded_uniform(canvas.seeds, z.shape[1])
        step = torch.searchsorted(alphas, uniform, right=True).clamp(max=self.steps)
        time = 1 - (step - 1).double() / self.steps
        yield from _unmask_at_steps(denoiser, z, canvas, step, time, self.params)

    def algorithm_1(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Every step at every masked position, as printed above."""
        process, mask = require_process(denoiser, Masking, PerTokenMasking), denoiser.vocab.mask_id
        z = init_tokens(denoiser, canvas)
        unmask_prob = _unmask_probs(process, self.steps)
        known: dict[int, LogX] = {}  # log_x of each sequence since its z last changed
        masked = canvas.host_mask(mask)
        for i in range(self.steps, 0, -1):
            active = np.flatnonzero(masked.any(1)).tolist()
            if not active:
                return
            if not denoiser.time_independent:
                known.clear()
            self._update(known, denoiser, z, masked, [b for b in active if b not in known], i / self.steps)
            log_x = torch.cat([known[b] for b in active])
            rows, columns = masked.nonzero()
            sequence, position = to_device(rows, z.device), to_device(columns, z.device)
            r = unmask_prob(i).to(z.device)
            uniform = seeded_uniform(canvas.seeds, z.shape[1], self.steps + 1 - i).to(z.device)[sequence, position]
            tokens = _draw_or_stay_masked(log_x, r, self.params, uniform, mask)
            z = scatter_tokens(z, sequence, position, tokens)
            on_host = tokens.cpu().numpy()
            if (on_host < 0).any():
                raise NonFiniteError(DAMAGED)
            written = on_host != mask
            masked[rows[written], columns[written]] = False
            for b in set(rows[written].tolist()):
                del known[b]
            yield z

    def _update(
        self,
        known: dict[int, LogX],
        denoiser: DenoiserLike,
        z: Tokens,
        masked: np.ndarray,
        sequences: list[int],
        t: float,
    ) -> None:
        """Query the network at all masked positions of these sequences."""
        if not sequences:
            return
        ids = torch.tensor(sequences, device=z.device)
        positions = Queries.from_host(masked[sequences], z.device)
        times = torch.full((len(sequences), 1), t, device=z.device)
        log_x = denoiser(z[ids], times, positions, sequence_ids=ids)
        known.update(zip(sequences, torch.split(log_x, masked[sequences].sum(1).tolist()), strict=True))


@dataclass(frozen=True)
class FirstHitting(Sampler):
    """The limit T to infinity: one position after the other, in random order, each at the time it is unmasked."""

    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    @property
    def order_follows(self) -> Literal["noise"]:
        return "noise"

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        schedule = require_process(denoiser, Masking).schedule
        if not denoiser.normalized:
            raise ValueError(
                "first-hitting needs a model whose probabilities sum to one (MDLM);"
                " take the sampler ancestral for D3PM and SEDD"
            )
        z = init_tokens(denoiser, canvas)
        alpha = seeded_uniform(canvas.seeds, z.shape[1])
        visible = torch.from_numpy(~canvas.host_mask(denoiser.vocab.mask_id))
        order = ranks(alpha.masked_fill(visible, torch.inf))
        yield from _unmask_at_steps(denoiser, z, canvas, order, schedule.inverse(alpha), self.params)


@dataclass(frozen=True)
class RandomOrder(Sampler):
    """Random order with fixed counts (LLaDA): each step unmasks an equal share of a sequence's masked positions."""

    steps: int = 128
    """The number of steps; more are better and slower."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    @property
    def order_follows(self) -> Literal["noise"]:
        return "noise"

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        z = init_tokens(denoiser, canvas)
        masked = torch.from_numpy(canvas.host_mask(denoiser.vocab.mask_id))
        num_masked = masked.sum(1)
        order = ranks(seeded_uniform(canvas.seeds, z.shape[1]).masked_fill(~masked, torch.inf))
        steps = min(self.steps, z.shape[1])  # further steps would unmask nothing
        done = tokens_per_step(num_masked[:, None], steps, torch.arange(steps)).cumsum(1)
        step = torch.searchsorted(done, order, right=True)
        before = torch.cat([torch.zeros_like(done[:, :1]), done], 1).gather(1, step)
        time = time_from_mask_ratio(denoiser, num_masked[:, None] - before, num_masked[:, None].clamp(min=1))
        yield from _unmask_at_steps(denoiser, z, canvas, step, time, self.params)


def _unmask_probs(process: Masking | PerTokenMasking, steps: int) -> Callable[[int], Float64[Tensor, " tokens"]]:
    """P(a masked position is unmasked) in step i = T, ..., 1: one number, or one for each token it may become."""
    if isinstance(process, PerTokenMasking):
        schedule = process.schedule
        return lambda i: schedule.unmask_prob(i, steps)
    alphas = alpha_grid(process.schedule, steps)
    return lambda i: Masking.unmask_prob(alphas[i - 1 : i], alphas[i : i + 1])


def _draw_or_stay_masked(
    log_x: LogX,
    unmask_prob: Float64[Tensor, " tokens"],
    params: SamplingParams,
    uniform: Float64[Tensor, " N"],
    mask_id: int,
) -> Int64[Tensor, " N"]:
    """A token [N] for each query: v with probability r_v exp(log_x[v]), the mask with what is left (0 if r = 1).

    -1 where log_x is damaged.
    """
    weights = params.probabilities(log_x).double() * unmask_prob
    rest = (1 - weights.sum(-1)).clamp(min=0)
    weights[:, mask_id] = torch.where((unmask_prob < 1).any(), rest, 0)
    return sample_inverse_cdf(weights, uniform, check=False)


def _unmask_at_steps(
    denoiser: DenoiserLike,
    z: Int[Tensor, "B L"],
    canvas: Canvas,
    step: Int[Tensor, "B L"],
    time: Float64[Tensor, "B L"],
    params: SamplingParams,
) -> Iterator[Tokens]:
    """Unmask each masked position at its own `step` [B, L] and `time` [B, L], both on the host.

    Positions of a sequence with the same step are written together; a call advances every unfinished sequence to its
    next step at which a position is unmasked.
    """
    mask, never = denoiser.vocab.mask_id, np.iinfo(np.int64).max
    uniform, times = seeded_uniform_array(canvas.seeds, z.shape[1], draw=1), time.numpy()
    pending = np.where(canvas.host_mask(mask), step.numpy(), never)
    while True:
        next_step = pending.min(1)
        active = np.flatnonzero(next_step != never)
        if len(active) == 0:
            return
        now = pending[active] == next_step[active, None]
        sequence, position = now.nonzero()
        t = to_device(times[active, now.argmax(1)][:, None], z.device)
        draw = DrawTokens(params, to_device(uniform[active[sequence], position], z.device), mask)
        ids, queries = to_device(active, z.device), Queries.from_host(now, z.device)
        tokens = denoiser(z[ids], t, queries, row_fn=draw, sequence_ids=ids)
        z = scatter_tokens(z, ids[queries[0]], queries[1], tokens)
        pending[active[sequence], position] = never
        yield z
