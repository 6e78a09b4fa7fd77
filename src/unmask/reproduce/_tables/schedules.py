"""Table 9: mean and variance of the bound under several noise schedules; and what low-discrepancy times are worth.

The variance per data point is that of one draw of the bound, in bits per token, over texts: each gets its own time. The
variance of times is that of the mean over a batch, over many draws for the same texts, so that only times and masks
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

from unmask.data.loader import Loader
from unmask.diffusion.noise import derive_seed, seeded_uniform
from unmask.diffusion.schedule import Cosine, CosineSquared, LinearSigma, LogLinear, Schedule
from unmask.objectives import MDLM
from unmask.objectives.base import Noise, corrupt_batch
from unmask.reproduce._measures import held_out_loader
from unmask.reproduce._statistics import below, same
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Column, Estimate, Figures, Row, Setup, Table, TrainedModel, Training
from unmask.types import Batch

_MEAN, _VARIANCE = Column("mean", "mean (bits/token)"), Column("variance", "variance per data point")
_LOG_VARIANCE, _BATCH_VARIANCE = Column("log_variance", "log variance"), Column("batch_variance", "variance of a batch")
_SCHEDULES: dict[str, Schedule] = {
    "log-linear": LogLinear(),
    "cosine": Cosine(),
    "cosine-squared": CosineSquared(),
    "linear": LinearSigma(sigma_min=0.0, sigma_max=20.0),
}
_BATCH_SIZE = 16
"""Rows whose times are drawn together."""
_NATS_PER_BIT = float(np.log(2))


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm")


def _measure(trained: TrainedModel) -> Figures:
    rows = trained.setup.windows or 2000
    figures: dict[str, dict[str, Estimate]] = {}
    with trained.lm.inference_mode():
        for name, schedule in _SCHEDULES.items():
            figures[name] = _moments(_one_draw_bits(trained, schedule, rows, draws=4))
        for name, times in _TIMES.items():
            figures[name] = _batch_variance(trained, times, batches=8, draws=max(8, rows // 10))
    return figures


def _moments(bits: NDArray[np.float64]) -> dict[str, Estimate]:
    """Mean and variance of draws of the bound [batches, rows], each with its standard error."""
    means, centred = bits.mean(1), bits - bits.mean()
    variance = float(bits.var(ddof=1))
    error = np.sqrt(max(0.0, float((centred**4).mean()) - variance**2) / bits.size)
    return {
        _MEAN.key: Estimate(float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))),
        _VARIANCE.key: Estimate(variance, float(error)),
        _LOG_VARIANCE.key: Estimate(float(np.log(variance)), float(error) / variance),
    }


def _one_draw_bits(trained: TrainedModel, schedule: Schedule, rows: int, draws: int) -> NDArray[np.float64]:
    """The bound in bits per token [batches, rows] of held-out rows, each from one draw at a time of its own.

    Each row's time is uniform; those of a batch are spread evenly, which lowers the error of the mean.
    """
    generator = torch.Generator().manual_seed(trained.seed)
    bits = [
        _row_bits(trained, MDLM(schedule=schedule), batch, _shared_offset(len(batch), generator), generator)
        for batch in _batches(held_out_loader(trained), rows, _BATCH_SIZE)
        for _ in range(draws)
    ]
    return np.stack(bits)


def _batch_variance(trained: TrainedModel, times: _Times, batches: int, draws: int) -> dict[str, Estimate]:
    """The variance of a batch's mean over draws for the same texts, averaged over batches."""
    generator = torch.Generator().manual_seed(trained.seed)
    variances = []
    for batch in _batches(held_out_loader(trained), batches * _BATCH_SIZE, _BATCH_SIZE):
        means = [
            _row_bits(trained, MDLM(), batch, times(len(batch), generator), generator).mean() for _ in range(draws)
        ]
        variances.append(np.var(means, ddof=1))
    mean, error = float(np.mean(variances)), float(np.std(variances, ddof=1) / np.sqrt(len(variances)))
    return {
        _BATCH_VARIANCE.key: Estimate(mean, error),
        _LOG_VARIANCE.key: Estimate(float(np.log(mean)), error / mean),
    }


def _batches(loader: Loader, rows: int, size: int) -> list[Batch]:
    """Whole batches of rows that lie evenly over the text."""
    available = min(rows, loader.num_sequential_rows)
    size = min(size, available)
    starts = range(0, available - size + 1, size)
    return [loader.sequential_batch(start, size, num_windows=available) for start in starts]


def _row_bits(
    trained: TrainedModel, objective: MDLM, batch: Batch, u: Float64[Tensor, "B 1"], generator: torch.Generator
) -> NDArray[np.float64]:
    """Bits per token [B] of each row at the times that u stands for."""
    denoiser, seed = trained.lm.denoiser, int(torch.randint(2**62, (), generator=generator))
    seeds = [derive_seed(seed, row) for row in range(len(batch))]
    uniform = seeded_uniform(seeds, batch.tokens.shape[1])
    batch, device = batch.to(trained.lm.device), trained.lm.device
    u, uniform = u.to(device), uniform.to(device)
    level, uniform = objective.level_of(denoiser, Noise(u, torch.ones_like(u), uniform), batch.loss_mask)
    z = corrupt_batch(objective.process, batch, level.alpha, uniform, denoiser.vocab)
    nats = objective.weighted_nll(denoiser, batch, z, level).double().sum(1) / batch.loss_mask.sum(1)
    bits: NDArray[np.float64] = nats.cpu().numpy() / _NATS_PER_BIT
    return bits


_Times = Callable[[int, torch.Generator], Float64[Tensor, "B 1"]]


def _independent(rows: int, generator: torch.Generator) -> Float64[Tensor, "B 1"]:
    return torch.rand(rows, 1, dtype=torch.float64, generator=generator)


def _own_offsets(rows: int, generator: torch.Generator) -> Float64[Tensor, "B 1"]:
    """(i + u_i)/N, as published."""
    return (torch.arange(rows)[torch.randperm(rows, generator=generator), None] + _independent(rows, generator)) / rows


def _shared_offset(rows: int, generator: torch.Generator) -> Float64[Tensor, "B 1"]:
    """(i/N + u) mod 1, as trained here."""
    strata = torch.randperm(rows, generator=generator)[:, None].double() / rows
    return (strata + _independent(1, generator)) % 1


_TIMES: dict[str, _Times] = {
    "independent": _independent,
    "own-offsets": _own_offsets,
    "shared-offset": _shared_offset,
}

TABLE = Table(
    name="schedules",
    number="Table 9",
    title="Mean and variance of the bound by noise schedule, and by how times are drawn",
    columns=(_MEAN, _VARIANCE, _BATCH_VARIANCE),
    rows=(
        Row("log-linear", "log-linear", {_MEAN.key: "3.30", _VARIANCE.key: "1.81"}),
        Row("cosine", "cosine", {_MEAN.key: "3.30", _VARIANCE.key: "3.30"}),
        Row("cosine-squared", "cosine squared", {_MEAN.key: "3.30", _VARIANCE.key: "3.30"}),
        Row("linear", "linear (sigma = 20 t)", {_MEAN.key: "3.30", _VARIANCE.key: "7.57"}),
        Row("independent", "independent times"),
        Row("own-offsets", "low discrepancy, own offsets"),
        Row("shared-offset", "low discrepancy, one offset"),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        same(
            "The bound does not depend on the noise schedule.",
            "log-linear",
            ("cosine", "cosine-squared"),
            column=_MEAN.key,
            margin=0.2,
            paired=True,
        ),
        same(
            "The bound is also the same under the linear schedule.",
            "log-linear",
            ("linear",),
            column=_MEAN.key,
            margin=0.5,
            paired=True,
        ),
        below(
            "The log-linear schedule has a lower variance than the cosine one.",
            "log-linear",
            "cosine",
            column=_LOG_VARIANCE.key,
            paired=True,
        ),
        below(
            "The log-linear schedule has a lower variance than the squared cosine.",
            "log-linear",
            "cosine-squared",
            column=_LOG_VARIANCE.key,
            paired=True,
        ),
        below(
            "The log-linear schedule has a lower variance than the linear one.",
            "log-linear",
            "linear",
            column=_LOG_VARIANCE.key,
            paired=True,
        ),
        below(
            "Low-discrepancy times lower the variance of a batch's loss.",
            "own-offsets",
            "independent",
            column=_LOG_VARIANCE.key,
            paired=True,
        ),
    ),
    protocol=(
        "One model, trained with the log-linear schedule, is measured under every schedule: without time conditioning"
        " its bound is the same under all.",
        "The paper's linear schedule has sigma = 1e8 t, at which uniform times see nothing but masks; here it is"
        " 20 t, which has the same ends and can be measured.",
        f"The variance of a batch is that of the mean over {_BATCH_SIZE} rows, over draws for the same rows.",
    ),
    data=TEXT,
    missing=missing_text,
    plot_columns=(_VARIANCE.key, _BATCH_VARIANCE.key),
)
