"""How many nats a model needs for given text: the bound on -log p, with its standard error.

Work is split over the ranks of a world by batches or texts whose noise is a function of their number, and
sums are added in one fixed order: the figures are the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unmask.context import Context
from unmask.data.corpus import TextStats
from unmask.data.loader import Loader
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.process import LeftToRight, Masking
from unmask.diffusion.time_sampling import ClippedTimes, UniformTimes
from unmask.distributed import Distributed
from unmask.likelihood.control_variate import CONTROL_VARIATE_BETA, control_variate, unconditional_nll
from unmask.likelihood.score import TIME_BINS, Score, combine_scores
from unmask.objectives import MDLM
from unmask.objectives.base import MaskedObjective, Objective
from unmask.types import Batch, NonFiniteError, Positions, RowFn, Times, Tokens

_NUM_REPLICATES = 8
"""Independent stratified estimates of each text, from whose spread the standard error comes."""
_MAX_BATCH_SIZE = 64
"""Maskings of one text that share a network call."""
_SAFETY_FACTOR = 1.5
"""By how much more is drawn than an error that is itself not well known asks for."""
_MAX_PASSES = 1024
"""Where the search for a requested precision ends."""
_MAX_DRAWS = 1 << 20
_MAX_REPLICATES = 1 << 12
"""What may be asked for: the error is then a thousandth of that of one draw, or a sixtieth."""


def score_sequence(
    denoiser: DenoiserLike,
    objective: Objective,
    ids: Sequence[int],
    text_stats: TextStats | None,
    draws: int,
    seed: int,
    text_index: int = 0,
) -> Score:
    """The score of text number `text`, given as ids that stand for text of some size; its draws are its own.

    A text longer than the model is cut into windows, which are scored one by one.
    """
    if not isinstance(draws, int) or not 2 * _NUM_REPLICATES <= draws <= _MAX_DRAWS:
        raise ValueError(
            f"draws must be at least {2 * _NUM_REPLICATES}, so that an error can be told, and at most"
            f" {_MAX_DRAWS:,}; got {draws!r}"
        )
    exact = isinstance(objective.process, LeftToRight)
    rows = 1 if exact else math.ceil(draws / _NUM_REPLICATES)
    scores = []
    for number, window in enumerate(_split_windows(ids, denoiser.max_length)):
        line = torch.tensor([window], device=_device_of(denoiser))
        dear = _token_baseline(denoiser, objective, len(window))
        estimates = np.zeros((1 if exact else _NUM_REPLICATES, TIME_BINS))
        tokens = np.zeros(len(window))
        for replicate in range(len(estimates)):
            for first in range(0, rows, _MAX_BATCH_SIZE):
                batch = Batch(
                    line.expand(min(_MAX_BATCH_SIZE, rows - first), -1),
                    row_offset=first,
                    global_batch_size=rows,
                )
                generator = _seeded_generator(seed, text_index, number, replicate, rows)
                nats, cells = _sample_nats(denoiser, objective, batch, generator, dear)
                estimates[replicate] += _sum_by_bin(nats, cells) / rows
                tokens += nats.sum(0).cpu().numpy() / (rows * len(estimates))
        scores.append(replace(_score_from_estimates(estimates, len(window), None), token_nats=tuple(tokens.tolist())))
    return replace(combine_scores(scores), text_stats=text_stats, per_text=())


def score_texts(
    denoiser: DenoiserLike,
    objective: Objective,
    texts: Sequence[tuple[Sequence[int], TextStats | None]],
    draws: int,
    seed: int,
    precision: float | None = None,
    distributed: Distributed = Distributed(),  # noqa: B008
) -> Score:
    """The score of texts, each given as ids and size; the ranks take turns.

    With `precision`, the first draws only say how many more it takes for a standard error of about that
    share of the nats; they are then drawn afresh, so that the error that is told is not one that was chosen.
    """
    _validate_precision(precision)
    # A line for each text: nats and variance, of all and of each part of the time.
    lines = np.zeros((len(texts), 2, 1 + TIME_BINS))
    for number in range(distributed.rank, len(texts), distributed.world_size):
        ids, size = texts[number]
        score = score_sequence(denoiser, objective, ids, size, draws, seed, number)
        if (factor := _draws_factor(score, precision)) > 1:
            wanted = min(_MAX_PASSES * _NUM_REPLICATES, math.ceil(draws * factor * _SAFETY_FACTOR))
            score = score_sequence(denoiser, objective, ids, size, max(draws + 1, wanted), seed, number)
        lines[number, :, 0] = score.nats, score.variance
        if score.nats_by_bin:
            lines[number, :, 1:] = score.nats_by_bin, score.variance_by_bin
    shared = distributed.all_reduce(torch.from_numpy(lines))
    timed = not isinstance(objective.process, LeftToRight)
    scores = []
    for (nats, variances), (ids, size) in zip(shared.tolist(), texts, strict=True):
        cells = (tuple(nats[1:]), tuple(variances[1:])) if timed else ((), ())
        scores.append(Score(nats[0], variances[0], len(ids), size, *cells))
    return combine_scores(scores)


def score_corpus(
    denoiser: DenoiserLike,
    objective: Objective,
    loader: Loader,
    text_stats: TextStats | None,
    windows: int | None,
    replicates: int,
    seed: int,
    precision: float | None = None,
    distributed: Distributed = Distributed(),  # noqa: B008
    progress: Callable[[int], None] | None = None,
) -> Score:
    """The score of `windows` windows (all, if None) that lie evenly over a text; `size` is that of these rows.

    Each replicate passes over the rows once, a fresh time and masking for each, stratified over a batch;
    the error is that of the mean over replicates, given the text. With `precision` there are more passes
    until the standard error is below that share of the nats. `report` is told the rows done so far.
    """
    wanted = loader.num_sequential_rows if windows is None else min(windows, loader.num_sequential_rows)
    exact = isinstance(objective.process, LeftToRight)
    if not exact and replicates < 2:
        raise ValueError(f"replicates must be at least 2, so that an error can be told; got {replicates}")
    if replicates > _MAX_REPLICATES:
        raise ValueError(f"replicates are at most {_MAX_REPLICATES:,}; got {replicates:,}")
    _validate_precision(precision)
    firsts = range(0, wanted, loader.batch_size)
    dear = _token_baseline(denoiser, objective, loader.layout.length)
    passes = np.zeros((0, TIME_BINS))
    needed = 1 if exact else replicates
    while len(passes) < needed:
        numbers = range(len(passes), needed)
        sums, tokens = _replicates(
            denoiser, objective, loader, firsts, wanted, numbers, seed, dear, distributed, progress
        )
        passes = np.concatenate([passes, sums])
        score = _score_from_estimates(passes, tokens, None)
        # At most four times as many at once: the error of few passes is itself not well known.
        needed = min(_MAX_PASSES, math.ceil(len(passes) * min(4.0, _draws_factor(score, precision))))
    return replace(score, text_stats=text_stats)


def _replicates(
    denoiser: DenoiserLike,
    objective: Objective,
    loader: Loader,
    batch_starts: range,
    num_windows: int,
    replicate_ids: range,
    seed: int,
    token_baseline: Tensor | None,
    distributed: Distributed,
    progress: Callable[[int], None] | None,
) -> tuple[NDArray[np.float64], int]:
    """Nats [passes, TIME_BINS] of some passes over the rows, and the tokens of one; the ranks take turns."""
    sums = np.zeros((len(batch_starts), len(replicate_ids), TIME_BINS))
    tokens = np.zeros(len(batch_starts))
    device = _device_of(denoiser)
    for turn in range(0, len(batch_starts), distributed.world_size):
        # A rank without a batch of its own repeats the last: sharded weights need every rank in every call.
        mine = turn + distributed.rank
        index = min(mine, len(batch_starts) - 1)
        batch = loader.sequential_batch(batch_starts[index], loader.batch_size, num_windows=num_windows)
        batch = replace(batch, row_offset=0, global_batch_size=None).to(device)
        for place, number in enumerate(replicate_ids):
            drawn = _sample_nats(
                denoiser,
                objective,
                batch,
                _seeded_generator(seed, number, batch_starts[index]),
                token_baseline,
            )
            if mine == index:
                sums[index, place] = _sum_by_bin(*drawn)
                tokens[index] = float(batch.loss_mask.sum())
            if progress is not None:
                before = replicate_ids[0] * num_windows + turn * loader.batch_size * len(replicate_ids)
                progress(before + (place + 1) * len(batch.tokens) * distributed.world_size)
    shared = distributed.all_reduce(torch.from_numpy(sums)).numpy()
    return shared.sum(0), int(distributed.all_reduce(torch.from_numpy(tokens)).sum())


class _TimeRecorder(DenoiserWrapper):
    """A denoiser that remembers the times and the rows of its first call."""

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
    """The bound itself, which a part of the times is not; and from draws of exact counts, where that is
    allowed: far less noise for short texts."""
    if not isinstance(objective, MaskedObjective):
        return objective
    if isinstance(objective.times, ClippedTimes):
        objective = replace(objective, times=UniformTimes())
    if objective.depends_on_alpha or not denoiser.time_independent:
        return objective
    if isinstance(objective, MDLM) and objective.steps is not None:
        return objective
    return replace(objective, exact_mask_counts=True)


def nats_by_bin(
    denoiser: DenoiserLike, objective: Objective, batch: Batch, generator: torch.Generator
) -> NDArray[np.float64]:
    """The nats [TIME_BINS] of one draw for each row of the batch, by the cell of [0, 1] that its t fell into."""
    return _sum_by_bin(*_sample_nats(denoiser, objective, batch, generator))


def _token_baseline(denoiser: DenoiserLike, objective: Objective, length: int) -> Tensor | None:
    """What tokens cost by themselves, if the luck of a draw can be told by it: exact counts in whole rows."""
    objective = _low_variance_objective(denoiser, objective)
    if not isinstance(objective, MaskedObjective) or not objective.exact_mask_counts:
        return None
    return unconditional_nll(denoiser, length, _device_of(denoiser)) if isinstance(objective.process, Masking) else None


def _sample_nats(
    denoiser: DenoiserLike,
    objective: Objective,
    batch: Batch,
    generator: torch.Generator,
    token_baseline: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The nats [B, L] of one draw for each row, and the cell of the time that they fell into.

    With prices, they are less their luck: the same nats on average, from all tokens instead of hidden ones.
    """
    clock = _TimeRecorder(denoiser)
    nats = _low_variance_objective(denoiser, objective).token_nll(clock, batch, generator).detach().double()
    if not bool(nats.isfinite().all()):
        raise NonFiniteError("the network's log-probabilities are NaN or infinite; its weights are damaged")
    assert clock.t is not None
    if token_baseline is not None:
        assert isinstance(clock.positions, Tensor)
        nats = nats - CONTROL_VARIATE_BETA * control_variate(
            token_baseline[batch.tokens], clock.positions, batch.loss_mask
        )
    t = clock.t[:, : nats.shape[1]]  # of the noisy text, where a clean one is read beside it
    # A step that ends at t stands for the time before it, so a cell has its upper end and not its lower.
    return nats, ((t * TIME_BINS).ceil().long() - 1).clamp(0, TIME_BINS - 1).expand(nats.shape)


def _sum_by_bin(nats: Tensor, bins: Tensor) -> NDArray[np.float64]:
    sums = torch.zeros(TIME_BINS, dtype=torch.float64, device=nats.device)
    return sums.index_add(0, bins.flatten(), nats.flatten()).cpu().numpy()


def _score_from_estimates(estimates: NDArray[np.float64], tokens: int, text_stats: TextStats | None) -> Score:
    """From independent estimates [replicates, TIME_BINS]; a single one is exact, and knows no time."""
    count = len(estimates)
    if count == 1:
        return Score(float(estimates.sum()), 0.0, tokens, text_stats)
    totals = estimates.sum(1)
    return Score(
        float(totals.mean()),
        float(totals.var(ddof=1)) / count,
        tokens,
        text_stats,
        tuple(estimates.mean(0).tolist()),
        tuple((estimates.var(0, ddof=1) / count).tolist()),
    )


def _draws_factor(score: Score, precision: float | None) -> float:
    """By what factor the draws must grow for the asked precision."""
    if precision is None or score.variance == 0:
        return 1.0
    return score.variance / (precision * score.nats) ** 2


def _validate_precision(precision: float | None) -> None:
    if precision is not None and not 0 < precision < 1:
        raise ValueError(f"precision is a share of the nats, as in 0.01 for a standard error of 1 %; got {precision}")


def _device_of(denoiser: DenoiserLike) -> torch.device:
    inner = denoiser
    while isinstance(inner, DenoiserWrapper):
        inner = inner.denoiser
    return next(inner.parameters()).device if isinstance(inner, nn.Module) else torch.device("cpu")


def _seeded_generator(*path: int) -> torch.Generator:
    """The randomness of one estimate: a function of its seed, window and replicate."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(path).generate_state(1)[0]))


def _split_windows(ids: Sequence[int], length: int | None) -> Iterator[Sequence[int]]:
    step = length or len(ids)
    return (ids[first : first + step] for first in range(0, len(ids), step))
