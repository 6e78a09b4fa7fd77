"""What a row of a request has the network do: write tokens, or score a text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import BatchableRowFn, DenoiserLike, DenoiserWrapper
from unmask.guidance import GuidanceFn
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import Score
from unmask.model import LanguageModel
from unmask.sampling import Sampler
from unmask.sampling.canvas import Canvas
from unmask.serve.engine import Job
from unmask.types import LogX, Positions, RowFn, Times, Tokens


@dataclass(frozen=True)
class TokenEvent:
    """What a step did at a position: the token it wrote, or None where it hid one again.

    `logprob` is the model's own, whatever the temperature; `alternatives` are its most probable tokens with
    their probabilities. Both are None where the network was not asked.
    """

    position: int
    id: int | None
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepEvent:
    """The canvas after a step, and what the step changed."""

    step: int
    ids: tuple[int, ...]
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class GeneratedSequence:
    """A filled canvas: its ids and, for each position, what wrote it and in which step (0: it was given)."""

    ids: tuple[int, ...]
    events: tuple[TokenEvent | None, ...]
    steps: tuple[int, ...]


def generation_job(
    model: LanguageModel,
    ids: Sequence[int],
    sampler: Sampler,
    seed: int,
    alternatives: int = 0,
    guidance: GuidanceFn | None = None,
    should_stop: Callable[[Sequence[int]], bool] | None = None,
) -> Job:
    """Fill the holes of `ids`, telling of every Step, until that is `enough`; the result is a Row."""
    mask = model.vocab.mask_id

    def job(denoiser: DenoiserLike, emit: Callable[[Any], None]) -> GeneratedSequence:
        heard = _RecordingDenoiser(model.ban_unknown_tokens(denoiser))
        shown = tuple(ids)
        start = torch.tensor([shown], device=model.device)
        written: list[TokenEvent | None] = [None] * len(ids)
        steps = [0] * len(ids)
        canvases = model.run_sampler(heard, Canvas(start, (seed,)), sampler, guidance=guidance)
        for number, z in enumerate(canvases, start=1):
            before, shown = shown, tuple(z[0].tolist())
            places = [place for place, (old, new) in enumerate(zip(before, shown, strict=True)) if old != new]
            marks = tuple(heard.token_events(places, shown, mask, alternatives))
            for mark in marks:
                written[mark.position], steps[mark.position] = mark, number
            heard.clear()
            emit(StepEvent(number, shown, marks))
            if should_stop is not None and should_stop(shown):
                break
        return GeneratedSequence(shown, tuple(written), tuple(steps))

    return job


def scoring_job(model: LanguageModel, ids: Sequence[int], draws: int, seed: int) -> Job:
    """Score a text."""

    def job(denoiser: DenoiserLike, _emit: Callable[[Any], None]) -> Score:
        config = ScoreConfig(draws, seed=seed)
        return score_requests(denoiser, model.objective, [ScoreRequest(ids)], config, per_token=True)

    return job


@dataclass(eq=False)
class _RecordingRowFn(BatchableRowFn):
    """Says what another `each` says of whole lines, or the lines if there is none, and keeps them."""

    row_fn: BatchableRowFn | None
    log_x: LogX | None = None

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        self.log_x = log_x
        return log_x if self.row_fn is None else self.row_fn(log_x, indices)

    @property
    def batch_key(self) -> Hashable:
        return _RecordingRowFn, id(self) if self.row_fn is None else self.row_fn.batch_key

    def merge(self, others: Sequence[_RecordingRowFn], num_queries: Sequence[int]) -> RowFn:
        assert self.row_fn is not None
        each, everybody = self.row_fn.merge([other.row_fn for other in others], num_queries), [self, *others]

        def joined(log_x: LogX, indices: slice | Tensor) -> Tensor:
            for listening, own in zip(everybody, torch.split(log_x, list(num_queries)), strict=True):
                listening.log_x = own
            return each(log_x, indices)

        return joined


class _RecordingDenoiser(DenoiserWrapper):
    """A denoiser that remembers its last answer."""

    def __init__(self, denoiser: DenoiserLike) -> None:
        super().__init__(denoiser)
        self._query_index: dict[int, int] = {}
        self._log_x: LogX | None = None

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
        joinable = row_fn if isinstance(row_fn, BatchableRowFn) else None
        listening = _RecordingRowFn(joinable)
        said = self.denoiser(z, t, positions, context, row_fn=listening, sequence_ids=sequence_ids)
        self._log_x = listening.log_x
        sequence, place = positions.nonzero(as_tuple=True) if isinstance(positions, Tensor) else positions
        if context.stages is not None:
            place = context.stages.position[place]
        elif context.cache is not None:
            place = place + context.cache.start
        pairs = enumerate(zip(sequence.tolist(), place.tolist(), strict=True))
        # Guidance reads a text again with its condition hidden, which is not what is written.
        self._query_index = {place: line for line, (number, place) in pairs if number == 0}
        # Anything else may fail, and then must not do so in everybody's call.
        return said if row_fn is None or joinable is not None else row_fn(said, slice(None))

    def clear(self) -> None:
        """The answer has been used: a row that waits must not keep the lines of a whole call in memory."""
        self._query_index, self._log_x = {}, None

    def token_events(
        self, positions: Sequence[int], ids: Sequence[int], mask_id: int, alternatives: int
    ) -> list[TokenEvent]:
        """What was written at these places, with what the network said there, if it was asked."""
        found = {place: TokenEvent(place, None if ids[place] == mask_id else ids[place]) for place in positions}
        asked = [place for place in positions if place in self._query_index and ids[place] != mask_id]
        if asked and self._log_x is not None:
            lines = [self._query_index[place] for place in asked]
            logprobs = self._log_x[lines, [ids[place] for place in asked]].tolist()
            others = _top_tokens(self._log_x[lines], alternatives) if alternatives else [()] * len(asked)
            for place, logprob, best in zip(asked, logprobs, others, strict=True):
                found[place] = TokenEvent(place, ids[place], logprob, best)
        return list(found.values())


def _top_tokens(log_x: LogX, k: int) -> list[tuple[tuple[int, float], ...]]:
    """The most probable tokens of each line, and how probable they are."""
    best = log_x.topk(min(k, log_x.shape[1] - 1))
    pairs = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    return [tuple(zip(tokens, chances, strict=True)) for tokens, chances in pairs]
