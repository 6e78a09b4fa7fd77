"""The bound on a tokenized corpus, with its standard error.

The ranks take turns at the batches. The noise of a batch is a function of the seed and its number, and sums are
added in one fixed order: the result is the same on any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.data.corpus import TextStats
from unmask.data.loader import Loader
from unmask.diffusion.denoiser import DenoiserLike
from unmask.distributed import Distributed
from unmask.likelihood._estimate import (
    NatsEstimator,
    draws_factor,
    score_from_replicates,
    seeded_generator,
    to_host,
    validate_precision,
)
from unmask.likelihood.score import TIME_BINS, Score
from unmask.objectives.base import Objective
from unmask.types import ProgressFn

_MAX_REPLICATES = 1 << 12
"""The error is then a sixtieth of that of one replicate."""
_MAX_REPLICATES_FOR_PRECISION = 1024
"""Where the search for a requested precision ends."""


@dataclass(frozen=True)
class EvalConfig:
    """How much of a corpus is scored, and how precisely."""

    windows: int | None = None
    """Score this many windows, spread evenly over the text; None scores all of them."""
    replicates: int = 8
    """Independent passes over the text, each with fresh times and noise; the standard error comes from their spread."""
    precision: float | None = None
    """Add replicates until the standard error is below this share of the nats: 0.01 for 1 %."""
    seed: int = 0
    """The seed of times and noise."""

    def __post_init__(self) -> None:
        if self.windows is not None and self.windows < 1:
            raise ValueError(f"windows must be at least 1; got {self.windows}")
        if self.seed < 0:
            raise ValueError(f"a seed must be 0 or above; got {self.seed}")
        if self.replicates > _MAX_REPLICATES:
            raise ValueError(f"replicates are at most {_MAX_REPLICATES:,}; got {self.replicates:,}")
        validate_precision(self.precision)


def score_corpus(
    denoiser: DenoiserLike,
    objective: Objective,
    loader: Loader,
    config: EvalConfig = EvalConfig(),  # noqa: B008
    text_stats: TextStats | None = None,
    distributed: Distributed = Distributed(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Score:
    """The score of the loader's windows, of which `text_stats` are those of the text that they hold.

    Times are stratified over each batch. The error is that of the mean over replicates, given the text.
    `progress` is called with the number of windows scored so far, over all replicates.
    """
    score = _CorpusScorer(NatsEstimator(denoiser, objective), loader, config, distributed, progress).score()
    return replace(score, text_stats=text_stats)


class _CorpusScorer:
    """Scores the windows of a loader, replicate by replicate."""

    def __init__(
        self,
        estimator: NatsEstimator,
        loader: Loader,
        config: EvalConfig,
        distributed: Distributed,
        progress: ProgressFn | None,
    ) -> None:
        if not estimator.is_exact and config.replicates < 2:
            raise ValueError(
                f"replicates must be at least 2, so that there is a standard error; got {config.replicates}"
            )
        self.estimator, self.loader, self.config = estimator, loader, config
        self.distributed, self.progress = distributed, progress
        available = loader.num_sequential_rows
        self.num_windows = available if config.windows is None else min(config.windows, available)
        self.batch_starts = range(0, self.num_windows, loader.batch_size)
        self.baseline = estimator.token_baseline(loader.layout.length)

    def score(self) -> Score:
        """All replicates, and as many more as the precision needs."""
        sums = np.zeros((0, TIME_BINS))
        needed = 1 if self.estimator.is_exact else self.config.replicates
        while len(sums) < needed:
            more, tokens = self._replicates(range(len(sums), needed))
            if not tokens:
                raise ValueError("there is nothing to score: all tokens of the text are only context, as N is in DNA")
            sums = np.concatenate([sums, more])
            score = score_from_replicates(sums, tokens)
            # At most four times as many at once: the error of few replicates is itself not well known.
            factor = min(4.0, draws_factor(score, self.config.precision))
            needed = min(_MAX_REPLICATES_FOR_PRECISION, math.ceil(len(sums) * factor))
        return score

    def _replicates(self, replicates: range) -> tuple[NDArray[np.float64], int]:
        """Nats [replicates, TIME_BINS], and the number of tokens of one replicate."""
        num_batches, world_size = len(self.batch_starts), self.distributed.world_size
        sums = np.zeros((num_batches, len(replicates), TIME_BINS))
        tokens = np.zeros(num_batches)
        for turn in range(0, num_batches, world_size):
            # A rank without a batch of its own repeats the last: sharded weights need every rank in every call.
            index = min(turn + self.distributed.rank, num_batches - 1)
            batch_sums, batch_tokens = self._score_batch(index, turn, replicates)
            if index == turn + self.distributed.rank:
                sums[index], tokens[index] = batch_sums, batch_tokens
        total = self.distributed.all_reduce(torch.from_numpy(sums)).numpy()
        return total.sum(0), int(self.distributed.all_reduce(torch.from_numpy(tokens)).sum())

    def _score_batch(self, index: int, turn: int, replicates: range) -> tuple[NDArray[np.float64], int]:
        """Nats [replicates, TIME_BINS] and number of tokens of one batch."""
        start, sums = self.batch_starts[index], np.zeros((len(replicates), TIME_BINS))
        batch = self.loader.sequential_batch(start, self.loader.batch_size, num_windows=self.num_windows)
        batch = batch.checked(self.estimator.denoiser.vocab)
        tokens = int(batch.loss_mask.sum())
        batch = replace(batch, row_offset=0, global_batch_size=None).to(self.estimator.device)
        u = None if self.baseline is None else self.baseline[batch.tokens]
        for number, replicate in enumerate(replicates):
            draw = self.estimator.draw(batch, seeded_generator(self.config.seed, replicate, start), u)
            sums[number] = to_host(draw.by_bin())[0]
            if self.progress is not None:
                before = replicates[0] * self.num_windows + turn * self.loader.batch_size * len(replicates)
                self.progress(before + (number + 1) * len(batch.tokens) * self.distributed.world_size)
        return sums, tokens
