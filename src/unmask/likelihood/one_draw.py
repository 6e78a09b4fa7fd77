"""How much one draw of the bound varies from text to text, under any schedule and any sampling of times.

The bound itself does not depend on the schedule; the variance of an estimate by one draw of (t, z) for each text does.
Near t = 0 a masked token has weight -alpha'/(1 - alpha), and its second moment is the integral of
alpha'^2/(1 - alpha): it is finite where 1 - alpha falls faster than t (cosine), and diverges as log(1/t) where
1 - alpha is linear in t (log-linear). Published figures stay away from 0: see `min_u`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

from unmask.config import lookup
from unmask.data.loader import Loader
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Schedule
from unmask.likelihood._estimate import NatsEstimator, to_host
from unmask.objectives.base import MaskedObjective, Noise, Objective, corrupt_batch
from unmask.types import Batch

_BITS_PER_NAT = 1 / math.log(2)


def _independent(random: np.random.Generator, n: int) -> NDArray[np.float64]:
    return random.random(n)


def _own_offset(random: np.random.Generator, n: int) -> NDArray[np.float64]:
    return (random.permutation(n) + random.random(n)) / n


def _shared_offset(random: np.random.Generator, n: int) -> NDArray[np.float64]:
    return (random.permutation(n) / n + random.random()) % 1


TIME_SAMPLINGS = {"independent": _independent, "own-offset": _own_offset, "shared-offset": _shared_offset}
"""How the n uniform numbers of a batch are drawn: alone; one in each of n strata, at a place of its own or at the same
place. Strata are dealt out at random, so that each text's time is uniform."""


@dataclass(frozen=True)
class OneDrawConfig:
    """What is drawn, and how often."""

    schedule: Schedule | None = None
    """The schedule to draw with; None is the model's own."""
    time_sampling: str = "shared-offset"
    """How the times of a batch are drawn: independent, own-offset or shared-offset."""
    windows: int | None = None
    """Draw for this many texts, spread evenly over all; None draws for all of them."""
    replicates: int = 8
    """Independent passes over the texts, each with one draw for each text."""
    min_u: float = 0.0
    """Squeeze the uniform numbers that times are made of into [min_u, 1], as published code does with 0.001. The
    mean is a bound only for 0."""
    seed: int = 0
    """The seed of times and noise."""

    def __post_init__(self) -> None:
        lookup(self.time_sampling, TIME_SAMPLINGS, "sampling of times")
        if self.windows is not None and self.windows < 2:
            raise ValueError(f"a variance over texts needs at least 2 windows; got {self.windows}")
        if self.replicates < 2:
            raise ValueError(f"replicates must be at least 2, so that there is a standard error; got {self.replicates}")
        if not 0 <= self.min_u < 1:
            raise ValueError(f"min_u must be in [0, 1); got {self.min_u}")


@dataclass(frozen=True)
class OneDrawStats:
    """The mean and the spread of one draw of the bound, in bits per token."""

    mean: float
    """Over all texts and replicates."""
    standard_error: float
    """Of the mean, from the spread of the replicates, given the texts."""
    variance: float
    """Over texts, of one draw for each: the mean of the replicates' variances."""
    variance_error: float
    """The standard error of the variance, from the spread of the replicates."""
    draw_error: float
    """The standard error of the mean over texts with one draw for each: what the sampling of times improves."""
    texts: int
    """How many texts there are."""


def one_draw_stats(
    denoiser: DenoiserLike,
    objective: Objective,
    loader: Loader,
    config: OneDrawConfig = OneDrawConfig(),  # noqa: B008
) -> OneDrawStats:
    """Mean and variance over the loader's texts of the bound by one draw; times are spread over each batch."""
    masked = _require_masked(objective, config)
    available = loader.num_sequential_rows
    num_windows = available if config.windows is None else min(config.windows, available)
    if num_windows < 2:
        raise ValueError(f"a variance over texts needs at least 2 of them; there are {num_windows}")
    rows: list[NDArray[np.float64]] = []
    device = NatsEstimator(denoiser, objective).device
    for start in range(0, num_windows, loader.batch_size):
        batch = loader.sequential_batch(start, loader.batch_size, num_windows=num_windows)
        batch = replace(batch, row_offset=0, global_batch_size=None).to(device)
        randoms = (np.random.default_rng([config.seed, r, start]) for r in range(config.replicates))
        draws = [
            to_host(_one_draw_bits(denoiser, masked, batch, *_draw_noise(batch, random, config))) for random in randoms
        ]
        rows.append(np.stack(draws))
    return _summarize(np.concatenate(rows, 1))


def _draw_noise(
    batch: Batch, random: np.random.Generator, config: OneDrawConfig
) -> tuple[Float64[Tensor, "B 1"], Float64[Tensor, "B L"]]:
    """Uniform numbers for the times [B, 1] and the tokens [B, L]."""
    u = torch.from_numpy(TIME_SAMPLINGS[config.time_sampling](random, len(batch)))[:, None]
    return config.min_u + (1 - config.min_u) * u, torch.from_numpy(random.random(tuple(batch.tokens.shape)))


@torch.no_grad()
def _one_draw_bits(
    denoiser: DenoiserLike,
    objective: MaskedObjective,
    batch: Batch,
    u: Float64[Tensor, "B 1"],
    uniform: Float64[Tensor, "B L"],
) -> Float64[Tensor, " B"]:
    """The bound of each row by one draw, in bits per token.

    A network that is told the time gets the one at which its own schedule has as many masks.
    """
    own, host = denoiser.process, batch.on_host
    assert isinstance(own, Masking)
    level, uniform = objective.level_of(denoiser, Noise(u, torch.ones_like(u), uniform), host.loss_mask)
    z = corrupt_batch(objective.process, host, level.alpha, uniform, denoiser.vocab)
    if objective.schedule != own.schedule:
        level = level._replace(t=own.schedule.inverse(level.alpha))
    nats = objective.weighted_nll(denoiser, batch, z, level).double().sum(1)
    return nats * _BITS_PER_NAT / batch.loss_mask.sum(1).clamp(min=1)


def _require_masked(objective: Objective, config: OneDrawConfig) -> MaskedObjective:
    """The objective with the config's schedule, each token masked by itself."""
    if not isinstance(objective, MaskedObjective) or objective.process.block_size is not None:
        raise ValueError(f"draws under a schedule are for MDLM, SEDD and D3PM; got {type(objective).__name__}")
    schedule = objective.schedule if config.schedule is None else config.schedule
    return replace(objective, schedule=schedule, exact_mask_counts=False)


def _summarize(bits: NDArray[np.float64]) -> OneDrawStats:
    """Of draws [replicates, texts]."""
    means, variances = bits.mean(1), bits.var(1, ddof=1)
    count = math.sqrt(len(bits))
    return OneDrawStats(
        mean=float(means.mean()),
        standard_error=float(means.std(ddof=1)) / count,
        variance=float(variances.mean()),
        variance_error=float(variances.std(ddof=1)) / count,
        draw_error=float(means.std(ddof=1)),
        texts=bits.shape[1],
    )
