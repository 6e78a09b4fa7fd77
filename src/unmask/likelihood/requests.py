"""The bound on texts, each given its prompt: thousands of short requests share network calls.

A request is one sequence, prompt ids + text ids. The prompt is visible and never noised, and only the text's nats
are counted: a bound on -log p(text | prompt). The noise of request i is a function of the seed, i and its own
tokens' positions, so the result does not depend on the other requests, on how they are batched (beyond the rounding
of floating-point sums), or on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64, Int
from numpy.typing import NDArray
from torch import Tensor

from unmask.data.corpus import TextStats
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
from unmask.likelihood.score import TIME_BINS, Score, combine_scores
from unmask.objectives.base import Objective
from unmask.types import Batch, NoiseGroup

_NUM_REPLICATES = 8
"""Independent stratified estimates of each text; the standard error comes from their spread."""
_MAX_CHUNK_ROWS = 64
"""Draws of one replicate that are never split over network calls."""
_MIN_REQUESTS_TO_MERGE = 16
"""Fewer requests get network calls of their own: there is little to gain, and rounding stays as if alone."""
_MAX_BATCH_TOKENS = 1 << 14
"""Tokens of a network call that several chunks share."""
_MAX_PADDING = 1 / 8
"""The largest share of a sequence that may be padding."""
_MAX_DRAWS = 1 << 20
"""The error is then a thousandth of that of one draw."""
_MAX_DRAWS_FOR_PRECISION = 1024 * _NUM_REPLICATES
"""Where the search for a requested precision ends."""
_SAFETY_FACTOR = 1.5
"""More draws than the first error asks for, as that error is itself not well known."""


@dataclass(frozen=True)
class ScoreRequest:
    """A text to score, given the prompt before it."""

    ids: Sequence[int]
    """The tokens of the text."""
    prompt: Sequence[int] = ()
    """The tokens of the prompt; none for the likelihood of the text by itself."""
    text_stats: TextStats | None = None
    """Bytes, characters and words of the text, if it is known as text."""
    seed: int | None = None
    """Draw as the first request of a call with this seed would; None for a stream of the call's own seed."""


@dataclass(frozen=True)
class ScoreConfig:
    """How precisely texts are scored."""

    draws: int = 64
    """Draws of time and noise for each text."""
    precision: float | None = None
    """Draw as often as it takes for a standard error of this share of the nats: 0.01 for 1 %."""
    seed: int = 0
    """Request i draws from stream i of this seed, unless it has a seed of its own."""
    enumerate_short: bool = False
    """Sum over all maskings of a text, where there are no more of them than draws, instead of drawing some: the same
    bound without an error. With 128 draws these are texts of up to 7 tokens; networks that read the time draw."""

    def __post_init__(self) -> None:
        if not isinstance(self.draws, int) or not 2 * _NUM_REPLICATES <= self.draws <= _MAX_DRAWS:
            raise ValueError(
                f"draws must be at least {2 * _NUM_REPLICATES}, so that there is a standard error, and at most"
                f" {_MAX_DRAWS:,}; got {self.draws!r}"
            )
        validate_precision(self.precision)


def score_requests(
    denoiser: DenoiserLike,
    objective: Objective,
    requests: Sequence[ScoreRequest],
    config: ScoreConfig = ScoreConfig(),  # noqa: B008
    distributed: Distributed = Distributed(),  # noqa: B008
    *,
    per_token: bool = False,
) -> Score:
    """The score of all requests together, and of each as `per_text`; with `per_token`, also the nats of each token.

    With a precision, the first draws only decide how many are needed. Those are drawn afresh, so that the reported
    error is not one that was selected.
    """
    scorer = _RequestScorer(NatsEstimator(denoiser, objective), requests, config, distributed, per_token)
    scores = scorer.score(dict.fromkeys(range(len(requests)), config.draws))
    needed = {index: _needed_draws(score, config) for index, score in scores.items()}
    scores |= scorer.score({index: draws for index, draws in needed.items() if draws > config.draws})
    return combine_scores([scores[index] for index in range(len(requests))])


def _needed_draws(score: Score, config: ScoreConfig) -> int:
    factor = draws_factor(score, config.precision)
    if factor <= 1:
        return config.draws
    return max(config.draws + 1, min(_MAX_DRAWS_FOR_PRECISION, math.ceil(config.draws * factor * _SAFETY_FACTOR)))


@dataclass(frozen=True)
class _Window:
    """A part of a text that the model reads at once, after its prompt."""

    request: int
    number: int
    prompt: Sequence[int]
    ids: Sequence[int]
    num_replicates: int
    """Independent estimates; one that is exact has no others."""
    num_draws: int
    """Draws of each replicate."""
    is_enumerated: bool = False
    """Whether the draws are all maskings of the text, each once."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)


@dataclass(frozen=True)
class _Chunk:
    """Draws `first ... first + num_rows - 1` of one replicate of a window: rows of the same batch."""

    window: _Window
    replicate: int
    first: int
    num_rows: int

    def noise_group(self, seed: int, stream: int) -> NoiseGroup:
        window = self.window
        generator = seeded_generator(seed, stream, window.number, self.replicate, window.num_draws)
        return NoiseGroup(generator, self.num_rows, self.first, window.num_draws)


class _RequestScorer:
    """Scores requests by their numbers, with a number of draws for each."""

    def __init__(
        self,
        estimator: NatsEstimator,
        requests: Sequence[ScoreRequest],
        config: ScoreConfig,
        distributed: Distributed,
        per_token: bool,
    ) -> None:
        self.estimator, self.requests, self.config = estimator, requests, config
        self.distributed, self.per_token = distributed, per_token

    def score(self, draws: Mapping[int, int]) -> dict[int, Score]:
        """The score of each request in `draws`; the ranks take turns at the batches."""
        windows = [window for index, count in draws.items() for window in self._windows(index, count)]
        chunks = [chunk for window in windows for chunk in self._chunks(window)]
        batches = _merge(chunks) if len(self.requests) >= _MIN_REQUESTS_TO_MERGE else [[i] for i in range(len(chunks))]
        width = TIME_BINS + (max((len(window.ids) for window in windows), default=0) if self.per_token else 0)
        sums = np.zeros((len(chunks), width))
        for numbers in batches[self.distributed.rank :: self.distributed.world_size]:
            sums[numbers] = self._score_batch([chunks[number] for number in numbers], width)
        sums = self.distributed.all_reduce(torch.from_numpy(sums)).numpy()
        scores: dict[int, list[Score]] = {index: [] for index in draws}
        start = 0
        for window in windows:
            end = start + window.num_replicates * math.ceil(window.num_draws / _MAX_CHUNK_ROWS)
            scores[window.request].append(self._window_score(window, sums[start:end]))
            start = end
        return {
            index: replace(combine_scores(parts), text_stats=self.requests[index].text_stats, per_text=())
            for index, parts in scores.items()
        }

    def _stream(self, index: int) -> tuple[int, int]:
        """The seed of a request, and the number of its stream."""
        own = self.requests[index].seed
        return (self.config.seed, index) if own is None else (own, 0)

    def _windows(self, index: int, draws: int) -> Iterator[_Window]:
        """The text in parts that the model can read; a prompt that is too long for this loses its beginning."""
        request, limit = self.requests[index], self.estimator.denoiser.max_length
        ids, prompt = request.ids, request.prompt
        if not prompt:
            size = limit or len(ids)
            for number, start in enumerate(range(0, len(ids), size)):
                yield self._window(index, number, (), ids[start : start + size], draws)
            return
        assert limit is None or len(ids) < limit
        yield self._window(index, 0, prompt if limit is None else prompt[-(limit - len(ids)) :], ids, draws)

    def _window(self, index: int, number: int, prompt: Sequence[int], ids: Sequence[int], draws: int) -> _Window:
        """A window with the replicates and draws of its own: exact where that is possible with as many draws."""
        if self.estimator.is_exact:
            return _Window(index, number, prompt, ids, 1, 1)
        maskings = 2 ** min(self._num_counted(ids), 64) - 1
        if self.config.enumerate_short and self.estimator.can_enumerate and 1 <= maskings <= draws:
            return _Window(index, number, prompt, ids, 1, maskings, is_enumerated=True)
        return _Window(index, number, prompt, ids, _NUM_REPLICATES, math.ceil(draws / _NUM_REPLICATES))

    def _num_counted(self, ids: Sequence[int]) -> int:
        """The tokens that are scored: all but those that are only context."""
        return len(ids) - sum(map(ids.count, self.estimator.denoiser.vocab.context_ids))

    def _chunks(self, window: _Window) -> Iterator[_Chunk]:
        for replicate in range(window.num_replicates):
            for first in range(0, window.num_draws, _MAX_CHUNK_ROWS):
                yield _Chunk(window, replicate, first, min(_MAX_CHUNK_ROWS, window.num_draws - first))

    def _score_batch(self, chunks: Sequence[_Chunk], width: int) -> NDArray[np.float64]:
        """Of each chunk [chunks, width]: the nats of each bin of the time, then those of each token."""
        chunk_of_row = torch.tensor([number for number, chunk in enumerate(chunks) for _ in range(chunk.num_rows)])
        batch = self._batch(chunks, chunk_of_row).to(self.estimator.device)
        chunk_of_row = chunk_of_row.to(self.estimator.device)
        if chunks[0].window.is_enumerated:
            rows = [chunk.first + row for chunk in chunks for row in range(chunk.num_rows)]
            draw = self.estimator.enumerate(batch, torch.tensor(rows) + 1)
        else:
            u = self._baselines(chunks, chunk_of_row, batch)
            draw = self.estimator.draw(batch, batch.noise_groups[0].generator, u)
        sums = draw.by_bin(chunk_of_row, len(chunks))
        if self.per_token:
            tokens = sums.new_zeros(len(chunks), width - TIME_BINS)
            parts = torch.split(draw.nats, [chunk.num_rows for chunk in chunks])
            for row, (chunk, nats) in enumerate(zip(chunks, parts, strict=True)):
                text = slice(len(chunk.window.prompt), chunk.window.length)
                tokens[row, : len(chunk.window.ids)] = nats.sum(0)[text]
            sums = torch.cat([sums, tokens], 1)
        return to_host(sums)

    def _batch(self, chunks: Sequence[_Chunk], chunk_of_row: Int[Tensor, " B"]) -> Batch:
        """All draws of the chunks, padded to the longest, on the host."""
        mask_id = self.estimator.denoiser.vocab.mask_id
        windows = [chunk.window for chunk in chunks]
        longest = max(window.length for window in windows)
        tokens = torch.tensor([[*w.prompt, *w.ids, *[mask_id] * (longest - w.length)] for w in windows])
        ends = torch.tensor([[len(w.prompt), w.length] for w in windows])[chunk_of_row]
        positions = torch.arange(longest)
        is_padded, has_prompt = any(w.length < longest for w in windows), any(w.prompt for w in windows)
        batch = Batch(
            tokens[chunk_of_row],
            valid=positions < ends[:, 1:] if is_padded else None,
            prompt_mask=positions < ends[:, :1] if has_prompt else None,
            noise_groups=tuple(chunk.noise_group(*self._stream(chunk.window.request)) for chunk in chunks),
        )
        return batch.checked(self.estimator.denoiser.vocab)

    def _baselines(
        self, chunks: Sequence[_Chunk], chunk_of_row: Int[Tensor, " B"], batch: Batch
    ) -> Float64[Tensor, "B L"] | None:
        """u [B, L] of the control variate: each token's, in a sequence as long as its own."""
        lengths = sorted({chunk.window.length for chunk in chunks})
        tables = [u for length in lengths if (u := self.estimator.token_baseline(length)) is not None]
        if not tables:
            return None
        table = torch.tensor([lengths.index(chunk.window.length) for chunk in chunks]).to(chunk_of_row.device)
        return torch.stack(tables)[table[chunk_of_row][:, None], batch.tokens]

    def _window_score(self, window: _Window, sums: NDArray[np.float64]) -> Score:
        """From the sums [chunks, width] of all its chunks, which are added in one fixed order."""
        chunks = (sums / window.num_draws).reshape(window.num_replicates, -1, sums.shape[1])
        replicates = sum(chunks[:, number, :TIME_BINS] for number in range(chunks.shape[1]))
        score = score_from_replicates(np.asarray(replicates), self._num_counted(window.ids))
        if not self.per_token:
            return score
        tokens = np.zeros(len(window.ids))
        for row in sums:
            tokens += row[TIME_BINS : TIME_BINS + len(window.ids)] / (window.num_draws * window.num_replicates)
        return replace(score, token_nats=tuple(tokens.tolist()))


def _merge(chunks: Sequence[_Chunk]) -> list[list[int]]:
    """Batches of chunk numbers: chunks of one kind and of about the same length together, the longest first."""
    batches: list[list[int]] = []
    longest = num_rows = 0
    kind: bool | None = None
    for number in sorted(range(len(chunks)), key=lambda i: (chunks[i].window.is_enumerated, -chunks[i].window.length)):
        chunk = chunks[number]
        num_rows += chunk.num_rows
        padding = longest - chunk.window.length
        is_full = num_rows * longest > _MAX_BATCH_TOKENS or padding > _MAX_PADDING * longest
        if is_full or kind != chunk.window.is_enumerated:
            batches.append([])
            longest, num_rows, kind = chunk.window.length, chunk.num_rows, chunk.window.is_enumerated
        batches[-1].append(number)
    return batches
