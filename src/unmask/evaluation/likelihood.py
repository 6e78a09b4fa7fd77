"""How many nats a model needs for given text: the bound on -log p, with its standard error.

Work is split over the ranks of a world by batches or texts whose noise is a function of their number, and
sums are added in one fixed order: the figures are the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unmask.data.loader import Loader
from unmask.data.textsize import TextSize
from unmask.diffusion.denoise import Around, Denoise
from unmask.diffusion.process import LeftToRight, Masking
from unmask.diffusion.times import PartTimes, UniformTimes
from unmask.evaluation.luck import BETA, luck, prices
from unmask.evaluation.score import CELLS, Score, total
from unmask.objectives import MDLM
from unmask.objectives.base import MaskedObjective, Objective
from unmask.types import Batch, DamagedError, Rows, Times, Tokens
from unmask.world import World

REPLICATES = 8
"""Independent stratified estimates of each text, from whose spread the standard error comes."""
MOST_ROWS = 64
"""Maskings of one text that share a network call."""
MARGIN = 1.5
"""By how much more is drawn than an error that is itself not well known asks for."""
MOST_PASSES = 1024
"""Where the search for a requested precision ends."""
MOST_DRAWS = 1 << 20
MOST_REPLICATES = 1 << 12
"""What may be asked for: the error is then a thousandth of that of one draw, or a sixtieth."""


def score_ids(
    denoise: Denoise,
    objective: Objective,
    ids: Sequence[int],
    size: TextSize | None,
    draws: int,
    seed: int,
    text: int = 0,
) -> Score:
    """The score of text number `text`, given as ids that stand for text of some size; its draws are its own.

    A text longer than the model is cut into windows, which are scored one by one.
    """
    if not isinstance(draws, int) or not 2 * REPLICATES <= draws <= MOST_DRAWS:
        raise ValueError(
            f"draws must be at least {2 * REPLICATES}, so that an error can be told, and at most"
            f" {MOST_DRAWS:,}; got {draws!r}"
        )
    exact = isinstance(objective.process, LeftToRight)
    rows = 1 if exact else math.ceil(draws / REPLICATES)
    scores = []
    for number, window in enumerate(_windows(ids, denoise.max_length)):
        line = torch.tensor([window], device=_device(denoise))
        dear = _prices(denoise, objective, len(window))
        estimates = np.zeros((1 if exact else REPLICATES, CELLS))
        tokens = np.zeros(len(window))
        for replicate in range(len(estimates)):
            for first in range(0, rows, MOST_ROWS):
                batch = Batch(line.expand(min(MOST_ROWS, rows - first), -1), first_row=first, total_rows=rows)
                generator = _generator(seed, text, number, replicate, rows)
                nats, cells = _drawn(denoise, objective, batch, generator, dear)
                estimates[replicate] += _by_cell(nats, cells) / rows
                tokens += nats.sum(0).cpu().numpy() / (rows * len(estimates))
        scores.append(replace(_score(estimates, len(window), None), token_nats=tuple(tokens.tolist())))
    return replace(total(scores), size=size, each=())


def score_texts(
    denoise: Denoise,
    objective: Objective,
    texts: Sequence[tuple[Sequence[int], TextSize | None]],
    draws: int,
    seed: int,
    precision: float | None = None,
    world: World = World(),  # noqa: B008
) -> Score:
    """The score of texts, each given as ids and size; the ranks take turns.

    With `precision`, the first draws only say how many more it takes for a standard error of about that
    share of the nats; they are then drawn afresh, so that the error that is told is not one that was chosen.
    """
    _check_precision(precision)
    # A line for each text: nats and variance, of all and of each part of the time.
    lines = np.zeros((len(texts), 2, 1 + CELLS))
    for number in range(world.rank, len(texts), world.size):
        ids, size = texts[number]
        score = score_ids(denoise, objective, ids, size, draws, seed, number)
        if (factor := _more(score, precision)) > 1:
            wanted = min(MOST_PASSES * REPLICATES, math.ceil(draws * factor * MARGIN))
            score = score_ids(denoise, objective, ids, size, max(draws + 1, wanted), seed, number)
        lines[number, :, 0] = score.nats, score.variance
        if score.cells:
            lines[number, :, 1:] = score.cells, score.cell_variances
    shared = world.summed(torch.from_numpy(lines))
    timed = not isinstance(objective.process, LeftToRight)
    scores = []
    for (nats, variances), (ids, size) in zip(shared.tolist(), texts, strict=True):
        cells = (tuple(nats[1:]), tuple(variances[1:])) if timed else ((), ())
        scores.append(Score(nats[0], variances[0], len(ids), size, *cells))
    return total(scores)


def score_rows(
    denoise: Denoise,
    objective: Objective,
    loader: Loader,
    size: TextSize | None,
    rows: int | None,
    replicates: int,
    seed: int,
    precision: float | None = None,
    world: World = World(),  # noqa: B008
    report: Callable[[int], None] | None = None,
) -> Score:
    """The score of `rows` rows (all, if None) that lie evenly over a text; `size` is that of these rows.

    Each replicate passes over the rows once, a fresh time and masking for each, stratified over a batch;
    the error is that of the mean over replicates, given the text. With `precision` there are more passes
    until the standard error is below that share of the nats. `report` is told the rows done so far.
    """
    wanted = loader.rows_in_order if rows is None else min(rows, loader.rows_in_order)
    exact = isinstance(objective.process, LeftToRight)
    if not exact and replicates < 2:
        raise ValueError(f"replicates must be at least 2, so that an error can be told; got {replicates}")
    if replicates > MOST_REPLICATES:
        raise ValueError(f"replicates are at most {MOST_REPLICATES:,}; got {replicates:,}")
    _check_precision(precision)
    firsts = range(0, wanted, loader.batch_size)
    dear = _prices(denoise, objective, loader.layout.length)
    passes = np.zeros((0, CELLS))
    needed = 1 if exact else replicates
    while len(passes) < needed:
        numbers = range(len(passes), needed)
        sums, tokens = _passes(denoise, objective, loader, firsts, wanted, numbers, seed, dear, world, report)
        passes = np.concatenate([passes, sums])
        score = _score(passes, tokens, None)
        # At most four times as many at once: the error of few passes is itself not well known.
        needed = min(MOST_PASSES, math.ceil(len(passes) * min(4.0, _more(score, precision))))
    return replace(score, size=size)


def _passes(
    denoise: Denoise,
    objective: Objective,
    loader: Loader,
    firsts: range,
    wanted: int,
    numbers: range,
    seed: int,
    dear: Tensor | None,
    world: World,
    report: Callable[[int], None] | None,
) -> tuple[NDArray[np.float64], int]:
    """Nats [passes, CELLS] of some passes over the rows, and the tokens of one; the ranks take turns."""
    sums = np.zeros((len(firsts), len(numbers), CELLS))
    tokens = np.zeros(len(firsts))
    device = _device(denoise)
    for turn in range(0, len(firsts), world.size):
        # A rank without a batch of its own repeats the last: sharded weights need every rank in every call.
        mine = turn + world.rank
        index = min(mine, len(firsts) - 1)
        batch = loader.in_order(firsts[index], loader.batch_size, of=wanted)
        batch = replace(batch, first_row=0, total_rows=None).to(device)
        for place, number in enumerate(numbers):
            drawn = _drawn(denoise, objective, batch, _generator(seed, number, firsts[index]), dear)
            if mine == index:
                sums[index, place] = _by_cell(*drawn)
                tokens[index] = float(batch.counted.sum())
            if report is not None:
                before = numbers[0] * wanted + turn * loader.batch_size * len(numbers)
                report(before + (place + 1) * len(batch.tokens) * world.size)
    shared = world.summed(torch.from_numpy(sums)).numpy()
    return shared.sum(0), int(world.summed(torch.from_numpy(tokens)).sum())


class Clock(Around):
    """A denoiser that remembers the times and the rows of its first call."""

    def __init__(self, denoise: Denoise) -> None:
        super().__init__(denoise)
        self.t: Tensor | None = None
        self.rows: Rows | None = None

    def __call__(self, z: Tokens, t: Times, rows: Rows, **context: Any) -> Tensor:
        if self.t is None:
            self.t, self.rows = t, rows
        return self.denoise(z, t, rows, **context)


def steadiest(denoise: Denoise, objective: Objective) -> Objective:
    """The bound itself, which a part of the times is not; and from draws of exact counts, where that is
    allowed: far less noise for short texts."""
    if not isinstance(objective, MaskedObjective):
        return objective
    if isinstance(objective.times, PartTimes):
        objective = replace(objective, times=UniformTimes())
    if objective.reads_alpha or not denoise.timeless:
        return objective
    if isinstance(objective, MDLM) and objective.steps is not None:
        return objective
    return replace(objective, exact_counts=True)


def nats_by_time(
    denoise: Denoise, objective: Objective, batch: Batch, generator: torch.Generator
) -> NDArray[np.float64]:
    """The nats [CELLS] of one draw for each row of the batch, by the cell of [0, 1] that its t fell into."""
    return _by_cell(*_drawn(denoise, objective, batch, generator))


def _prices(denoise: Denoise, objective: Objective, length: int) -> Tensor | None:
    """What tokens cost by themselves, if the luck of a draw can be told by it: exact counts in whole rows."""
    objective = steadiest(denoise, objective)
    if not isinstance(objective, MaskedObjective) or not objective.exact_counts:
        return None
    return prices(denoise, length, _device(denoise)) if isinstance(objective.process, Masking) else None


def _drawn(
    denoise: Denoise,
    objective: Objective,
    batch: Batch,
    generator: torch.Generator,
    dear: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The nats [B, L] of one draw for each row, and the cell of the time that they fell into.

    With prices, they are less their luck: the same nats on average, from all tokens instead of hidden ones.
    """
    clock = Clock(denoise)
    nats = steadiest(denoise, objective).token_nll(clock, batch, generator).detach().double()
    if not bool(nats.isfinite().all()):
        raise DamagedError("the network's log-probabilities are NaN or infinite; its weights are damaged")
    assert clock.t is not None
    if dear is not None:
        assert isinstance(clock.rows, Tensor)
        nats = nats - BETA * luck(dear[batch.tokens], clock.rows, batch.counted)
    t = clock.t[:, : nats.shape[1]]  # of the noisy text, where a clean one is read beside it
    # A step that ends at t stands for the time before it, so a cell has its upper end and not its lower.
    return nats, ((t * CELLS).ceil().long() - 1).clamp(0, CELLS - 1).expand(nats.shape)


def _by_cell(nats: Tensor, cell: Tensor) -> NDArray[np.float64]:
    sums = torch.zeros(CELLS, dtype=torch.float64, device=nats.device)
    return sums.index_add(0, cell.flatten(), nats.flatten()).cpu().numpy()


def _score(estimates: NDArray[np.float64], tokens: int, size: TextSize | None) -> Score:
    """From independent estimates [replicates, CELLS]; a single one is exact, and knows no time."""
    count = len(estimates)
    if count == 1:
        return Score(float(estimates.sum()), 0.0, tokens, size)
    totals = estimates.sum(1)
    return Score(
        float(totals.mean()),
        float(totals.var(ddof=1)) / count,
        tokens,
        size,
        tuple(estimates.mean(0).tolist()),
        tuple((estimates.var(0, ddof=1) / count).tolist()),
    )


def _more(score: Score, precision: float | None) -> float:
    """By what factor the draws must grow for the asked precision."""
    if precision is None or score.variance == 0:
        return 1.0
    return score.variance / (precision * score.nats) ** 2


def _check_precision(precision: float | None) -> None:
    if precision is not None and not 0 < precision < 1:
        raise ValueError(
            f"precision is a share of the nats, as in 0.01 for a standard error of 1 %; got {precision}"
        )


def _device(denoise: Denoise) -> torch.device:
    inner = denoise
    while isinstance(inner, Around):
        inner = inner.denoise
    return next(inner.parameters()).device if isinstance(inner, nn.Module) else torch.device("cpu")


def _generator(*path: int) -> torch.Generator:
    """The randomness of one estimate: a function of its seed, window and replicate."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(path).generate_state(1)[0]))


def _windows(ids: Sequence[int], length: int | None) -> Iterator[Sequence[int]]:
    step = length or len(ids)
    return (ids[first : first + step] for first in range(0, len(ids), step))
