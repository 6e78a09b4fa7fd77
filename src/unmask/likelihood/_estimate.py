"""The nats of a batch from one draw of times and noise: an unbiased estimate of the bound on -log p."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.noise_level import NoiseLevel
from unmask.diffusion.time_sampling import ClippedTimes, UniformTimes
from unmask.likelihood._control_variate import CONTROL_VARIATE_BETA, control_variate, unconditional_nll
from unmask.likelihood.score import TIME_BINS, Score
from unmask.objectives.base import MaskedObjective, Objective, SteppedObjective
from unmask.types import Batch, NonFiniteError, Positions, Queries, RowFn, Times, Tokens


@dataclass(frozen=True)
class Draw:
    """The nats [B, L] of one draw for each sequence, and the bin of the time of each token."""

    nats: Float64[Tensor, "B L"]
    bins: Int[Tensor, "B L"]

    def by_bin(
        self, groups: Int[Tensor, " B"] | None = None, num_groups: int = 1
    ) -> Float64[Tensor, "num_groups bins"]:
        """Sums [num_groups, TIME_BINS] over the tokens of each bin, and of each group of sequences [B]."""
        index = self.bins if groups is None else self.bins + TIME_BINS * groups[:, None]
        sums = torch.zeros(num_groups * TIME_BINS, dtype=torch.float64, device=self.nats.device)
        return sums.index_add(0, index.flatten(), self.nats.flatten()).view(num_groups, TIME_BINS)


class NatsEstimator:
    """Draws of the bound on -log p, with the lowest variance that the objective and the network allow."""

    def __init__(self, denoiser: DenoiserLike, objective: Objective) -> None:
        if objective.why_no_likelihood is not None:
            raise ValueError(objective.why_no_likelihood)
        self.denoiser = denoiser
        self.objective = _low_variance_objective(denoiser, objective.bound)
        self.is_exact = objective.process.is_left_to_right
        """Whether there is nothing to draw: the nats are -log p itself."""
        self.can_enumerate = (
            isinstance(self.objective, MaskedObjective)
            and self.objective.exact_mask_counts
            and self.objective.process.block_size is None
            and not (isinstance(self.objective, SteppedObjective) and not self.objective.carry_over)
        )
        """Whether the bound depends only on which tokens are masked, so that all maskings can be summed."""
        self.device = device_of(denoiser)
        self._baselines: dict[int, Tensor] = {}

    def draw(self, batch: Batch, generator: torch.Generator, u: Float64[Tensor, "B L"] | None = None) -> Draw:
        """One draw for each sequence, less the control variate if the baselines u [B, L] of its tokens are given."""
        recorder = _TimeRecorder(self.denoiser)
        if u is None:
            nats = self.objective.token_nll(recorder, batch, generator).detach().double()
        else:
            assert isinstance(self.objective, MaskedObjective)
            nll, level = self.objective.nll_and_level(recorder, batch, generator)
            masked = _to_mask(recorder.positions, batch.loss_mask)
            nats = nll.detach().double() - CONTROL_VARIATE_BETA * control_variate(u, masked, batch.loss_mask, level)
        assert recorder.t is not None
        # Of one draw, if a call has two; of the noisy tokens only, if clean ones are concatenated to them.
        t = recorder.t[: len(nats), : nats.shape[1]]
        if self.denoiser.process.inserts_tokens:  # its positions are not those of the text
            t = t.amax(1, keepdim=True)
        # A step that ends at t covers the times before it, so a bin includes its upper end and not its lower.
        return Draw(nats, ((t * TIME_BINS).ceil().long() - 1).clamp(0, TIME_BINS - 1).expand(nats.shape))

    def enumerate(self, batch: Batch, maskings: Int[Tensor, " B"]) -> Draw:
        """The nats of given maskings, whose mean over all 2^n - 1 of a text's n tokens is the bound.

        Bit i of a masking [B] masks the i-th of the n tokens. With k of them masked, its weight in the bound is
        1/(k C(n, k)): k is uniform, the choice of k tokens is too, and each has the weight n/k.
        """
        assert isinstance(self.objective, MaskedObjective)
        host = batch.on_host
        loss_mask, vocab = host.loss_mask, self.denoiser.vocab
        masked = loss_mask & ((maskings[:, None] >> (loss_mask.cumsum(1) - 1).clamp(min=0)) & 1).bool()
        counts = list(zip(loss_mask.sum(1).tolist(), masked.sum(1).tolist(), strict=True))
        weight = torch.tensor([[(2**n - 1) / (k * math.comb(n, k))] for n, k in counts], dtype=torch.float64)
        alpha = torch.tensor([[1 - k / n] for n, k in counts], dtype=torch.float64)
        level = NoiseLevel(self.objective.schedule.inverse(alpha), alpha, None, weight)
        z = host.tokens.where(~masked, vocab.mask_id)
        nats = self.objective.weighted_nll(self.denoiser, batch, z, level).detach().double()
        return Draw(nats, torch.zeros_like(batch.tokens))

    def token_baseline(self, length: int) -> Float64[Tensor, " V"] | None:
        """u [V] of the control variate for sequences of this length; None for objectives that have none."""
        if not isinstance(self.objective, MaskedObjective) or self.objective.process.block_size is not None:
            return None
        if length not in self._baselines:
            self._baselines[length] = unconditional_nll(self.denoiser, length, self.device)
        return self._baselines[length]


def _to_mask(positions: Positions | None, like: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Positions in any of their forms as booleans [B, L]."""
    if isinstance(positions, Queries):
        return positions.mask()
    if isinstance(positions, Tensor):
        return positions
    assert positions is not None
    mask = torch.zeros_like(like)
    mask[positions] = True
    return mask


def to_host(sums: Tensor) -> NDArray[np.float64]:
    """Sums of nats as numpy: the one read from the device for each batch, which also finds damaged weights."""
    values: NDArray[np.float64] = sums.numpy(force=True)
    if not np.isfinite(values).all():
        raise NonFiniteError("the network's log-probabilities are NaN or infinite; its weights are damaged")
    return values


def seeded_generator(*path: int) -> torch.Generator:
    """The generator of one estimate: a function of the seed and of the numbers of text, window and replicate."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(path).generate_state(1)[0]))


def score_from_replicates(replicates: NDArray[np.float64], tokens: int) -> Score:
    """The mean of independent estimates [replicates, TIME_BINS]; a single one is exact, and has no times."""
    count = len(replicates)
    if count == 1:
        return Score(float(replicates.sum()), 0.0, tokens)
    totals = replicates.sum(1)
    return Score(
        float(totals.mean()),
        float(totals.var(ddof=1)) / count,
        tokens,
        nats_by_bin=tuple(replicates.mean(0).tolist()),
        variance_by_bin=tuple((replicates.var(0, ddof=1) / count).tolist()),
    )


def draws_factor(score: Score, precision: float | None) -> float:
    """The factor by which the draws must grow for a standard error of `precision` times the nats."""
    if precision is None or score.variance == 0:
        return 1.0
    return score.variance / (precision * score.nats) ** 2


def validate_precision(precision: float | None) -> None:
    """Refuse a relative error that is not between 0 and 1."""
    if precision is not None and not 0 < precision < 1:
        raise ValueError(f"precision is a share of the nats, as in 0.01 for a standard error of 1 %; got {precision}")


class _TimeRecorder(DenoiserWrapper):
    """A denoiser that records the times and the positions of its first call."""

    def __init__(self, denoiser: DenoiserLike) -> None:
        super().__init__(denoiser)
        self.t: Tensor | None = None
        self.positions: Positions | None = None

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
        if self.t is None:
            self.t, self.positions = t, positions
        return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)


def _low_variance_objective(denoiser: DenoiserLike, objective: Objective) -> Objective:
    """The objective over all times, as only that is a bound; with exact mask counts where they give the same bound."""
    if not isinstance(objective, MaskedObjective):
        return objective
    if isinstance(objective.times, ClippedTimes):
        objective = replace(objective, times=UniformTimes())
    if objective.depends_on_alpha or not denoiser.time_independent:
        return objective
    if isinstance(objective, SteppedObjective) and objective.steps is not None:
        return objective
    return replace(objective, exact_mask_counts=True)


def device_of(denoiser: DenoiserLike) -> torch.device:
    inner = denoiser
    while isinstance(inner, DenoiserWrapper):
        inner = inner.denoiser
    return next(inner.parameters()).device if isinstance(inner, nn.Module) else torch.device("cpu")
