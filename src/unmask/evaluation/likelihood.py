"""How many nats a model needs for given text: the bound on -log p, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from unmask.data.loader import Loader
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import LeftToRight
from unmask.objectives.base import Objective
from unmask.types import Batch

REPLICATES = 8
"""Independent stratified estimates of each text, from whose spread the standard error comes."""


@dataclass(frozen=True)
class Score:
    """Nats of some text, and of each of its parts; `standard_error` is of `nats_per_token`.

    `nats` is an unbiased estimate of an upper bound on -log p (exact, with no error, for an
    autoregressive model). `bytes` is None where there was no text but ids.
    """

    nats: float
    variance: float
    tokens: int
    bytes: int | None
    each: tuple[Score, ...] = field(default=(), repr=False)

    @property
    def nats_per_token(self) -> float:
        """The bound, per token."""
        return self.nats / self.tokens

    @property
    def standard_error(self) -> float:
        """Of `nats_per_token`, from the draws of times and masks."""
        return math.sqrt(self.variance) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """nats / (bytes log 2)."""
        if self.bytes is None:
            raise ValueError("bits per byte need text; ids were scored")
        return self.nats / (self.bytes * math.log(2))


def total(scores: Sequence[Score]) -> Score:
    """The score of all texts together."""
    sizes = [score.bytes for score in scores]
    return Score(
        nats=sum(score.nats for score in scores),
        variance=sum(score.variance for score in scores),
        tokens=sum(score.tokens for score in scores),
        bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        each=tuple(scores),
    )


def score_ids(
    denoise: Denoise,
    objective: Objective,
    ids: Sequence[int],
    size: int | None,
    draws: int,
    seed: int,
    text: int = 0,
) -> Score:
    """The score of text number `text`, given as ids that stand for `size` bytes; its draws are its own.

    A text longer than the model is cut into windows, which are scored one by one.
    """
    if draws < 2 * REPLICATES:
        raise ValueError(
            f"draws must be at least {2 * REPLICATES}, so that an error can be told; got {draws}"
        )
    exact = isinstance(objective.process, LeftToRight)
    nats = variance = 0.0
    for number, window in enumerate(_windows(ids, denoise.max_length)):
        rows = 1 if exact else math.ceil(draws / REPLICATES)
        batch = Batch(torch.tensor([window]).expand(rows, -1))
        estimates = []
        for replicate in range(1 if exact else REPLICATES):
            token_nll = objective.token_nll(denoise, batch, _generator(seed, text, number, replicate))
            estimates.append(float(token_nll.double().sum()) / rows)
        if not math.isfinite(sum(estimates)):
            raise ValueError("the network's log-probabilities are NaN or infinite; its weights are damaged")
        mean = sum(estimates) / len(estimates)
        nats += mean
        if not exact:
            spread = sum((estimate - mean) ** 2 for estimate in estimates) / (REPLICATES - 1)
            variance += spread / REPLICATES
    return Score(nats, variance, len(ids), size)


def score_rows(
    denoise: Denoise,
    objective: Objective,
    loader: Loader,
    size: int,
    rows: int | None,
    replicates: int,
    seed: int,
) -> Score:
    """The score of the first `rows` rows (all, if None) of a text of `size` bytes.

    Each replicate passes over the rows once, a fresh time and masking for each, stratified over a batch;
    the error is that of the mean over replicates, given the text.
    """
    wanted = loader.rows_in_order if rows is None else min(rows, loader.rows_in_order)
    exact = isinstance(objective.process, LeftToRight)
    passes = 1 if exact else replicates
    if not exact and replicates < 2:
        raise ValueError(f"replicates must be at least 2, so that an error can be told; got {replicates}")
    device = next(denoise.parameters()).device if isinstance(denoise, nn.Module) else torch.device("cpu")
    sums, tokens = [0.0] * passes, 0
    for first in range(0, wanted, loader.batch_size):
        batch = loader.in_order(first, min(loader.batch_size, wanted - first))
        batch = replace(batch, first_row=0, total_rows=None).to(device)
        tokens += int(batch.counted.sum())
        for number in range(passes):
            nats = objective.token_nll(denoise, batch, _generator(seed, number, first))
            sums[number] += float(nats.double().sum())
    if not math.isfinite(sum(sums)):
        raise ValueError("the network's log-probabilities are NaN or infinite; its weights are damaged")
    mean = sum(sums) / passes
    variance = 0.0 if exact else sum((s - mean) ** 2 for s in sums) / (passes - 1) / passes
    share = tokens / loader.stream.tokens
    return Score(mean, variance, tokens, round(size * share))


def _generator(*path: int) -> torch.Generator:
    """The randomness of one estimate: a function of its seed, window and replicate."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(path).generate_state(1)[0]))


def _windows(ids: Sequence[int], length: int | None) -> Iterator[Sequence[int]]:
    step = length or len(ids)
    return (ids[first : first + step] for first in range(0, len(ids), step))
