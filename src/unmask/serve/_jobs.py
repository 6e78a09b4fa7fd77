"""Jobs of the engine: generate a sequence, score a text, or find the lengths of its holes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper, MergeableRowFn
from unmask.guidance import GuidanceFn
from unmask.likelihood.hole_lengths import HoleLengths, hole_lengths
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import Score
from unmask.model import LanguageModel
from unmask.sampling import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.templates import EncodedTemplate
from unmask.sampling.trace import track_steps
from unmask.serve._engine import Job
from unmask.types import LogX, Positions, RowFn, Times, Tokens


@dataclass(frozen=True)
class TokenEvent:
    """A change of a step at a position: the new token, or None if it was remasked.

    `logprob` is the model's, without temperature; `alternatives` are its most probable tokens with their
    probabilities. They are None and empty if the last call had no query at the position.
    """

    position: int
    id: int | None
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepEvent:
    """The ids after a step, and the changes of the step."""

    step: int
    ids: tuple[int, ...]
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class GeneratedSequence:
    """A finished sequence: its ids and, for each position, its last event and step (0: it was given)."""

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
    """Fill the masks of `ids`, emitting a StepEvent per step, until `should_stop`; returns a GeneratedSequence."""

    def job(denoiser: DenoiserLike, emit: Callable[[Any], None]) -> GeneratedSequence:
        recorder = _RecordingDenoiser(model.ban_unknown_tokens(denoiser))
        current = tuple(ids)
        start = torch.tensor([current], device=model.device)
        last_events: list[TokenEvent | None] = [None] * len(ids)
        steps = [0] * len(ids)
        canvases = model.run_sampler(recorder, Canvas(start, (seed,)), sampler, guidance=guidance)
        for step in track_steps(canvases, start, model.vocab.mask_id):
            number, current = step.number, tuple(step.tokens[0].tolist())
            changed = step.changed[0].nonzero()[:, 0].tolist()
            events = tuple(recorder.token_events(changed, current, model.vocab.mask_id, alternatives))
            for event in events:
                last_events[event.position], steps[event.position] = event, number
            recorder.clear()
            emit(StepEvent(number, current, events))
            if should_stop is not None and should_stop(current):
                break
        return GeneratedSequence(current, tuple(last_events), tuple(steps))

    return job


def lengths_job(template: EncodedTemplate) -> Job:
    """How probable each length of the open holes of a template is, as `LanguageModel.hole_lengths` finds it."""

    def job(denoiser: DenoiserLike, _emit: Callable[[Any], None]) -> HoleLengths:
        return hole_lengths(denoiser, template.pieces)

    return job


def scoring_job(model: LanguageModel, ids: Sequence[int], draws: int, seed: int) -> Job:
    """Score a text of these ids."""

    def job(denoiser: DenoiserLike, _emit: Callable[[Any], None]) -> Score:
        config = ScoreConfig(draws, seed=seed)
        return score_requests(denoiser, model.objective, [ScoreRequest(ids)], config, per_token=True)

    return job


@dataclass(eq=False)
class _RecordingRowFn(MergeableRowFn):
    """Applies another row function, if there is one, and records the rows of log_x."""

    row_fn: MergeableRowFn | None
    log_x: LogX | None = None

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        self.log_x = log_x
        return log_x if self.row_fn is None else self.row_fn(log_x, indices)

    @property
    def batch_key(self) -> Hashable:
        return _RecordingRowFn, id(self) if self.row_fn is None else self.row_fn.batch_key

    def merge(self, others: Sequence[_RecordingRowFn], num_queries: Sequence[int]) -> RowFn:
        assert self.row_fn is not None
        merged = self.row_fn.merge([other.row_fn for other in others], num_queries)

        def record_and_apply(log_x: LogX, indices: slice | Tensor) -> Tensor:
            parts = torch.split(log_x, list(num_queries))
            for recorder, part in zip([self, *others], parts, strict=True):
                recorder.log_x = part
            return merged(log_x, indices)

        return record_and_apply


class _RecordingDenoiser(DenoiserWrapper):
    """A denoiser that records log_x of its last call."""

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
        batchable = row_fn if isinstance(row_fn, MergeableRowFn) else None
        recorder = _RecordingRowFn(batchable)
        output = self.denoiser(z, t, positions, context, row_fn=recorder, sequence_ids=sequence_ids)
        self._log_x = recorder.log_x
        sequence, position = positions.nonzero(as_tuple=True) if isinstance(positions, Tensor) else positions
        if context.stages is not None:
            position = context.stages.position[position]
        elif context.cache is not None:
            position = position + context.cache.start
        pairs = enumerate(zip(sequence.tolist(), position.tolist(), strict=True))
        # Classifier-free guidance adds a second sequence without the condition, which is not recorded.
        self._query_index = {position: row for row, (index, position) in pairs if index == 0}
        # Other row functions run here, in the job: their errors must not fail the whole batch.
        return output if row_fn is None or batchable is not None else row_fn(output, slice(None))

    def clear(self) -> None:
        """Release log_x: a waiting job must not keep a whole batch in memory."""
        self._query_index, self._log_x = {}, None

    def token_events(
        self, positions: Sequence[int], ids: Sequence[int], mask_id: int, alternatives: int
    ) -> list[TokenEvent]:
        """The events at these positions, with log-probabilities where the last call had a query."""
        events = {i: TokenEvent(i, None if ids[i] == mask_id else ids[i]) for i in positions}
        queried = [i for i in positions if i in self._query_index and ids[i] != mask_id]
        if queried and self._log_x is not None:
            rows = [self._query_index[i] for i in queried]
            logprobs = self._log_x[rows, [ids[i] for i in queried]].tolist()
            top = _top_tokens(self._log_x[rows], alternatives) if alternatives else [()] * len(queried)
            for i, logprob, best in zip(queried, logprobs, top, strict=True):
                events[i] = TokenEvent(i, ids[i], logprob, best)
        return list(events.values())


def _top_tokens(log_x: LogX, k: int) -> list[tuple[tuple[int, float], ...]]:
    """The most probable tokens of each row, with their probabilities."""
    best = log_x.topk(min(k, log_x.shape[1] - 1))
    pairs = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    return [tuple(zip(tokens, probabilities, strict=True)) for tokens, probabilities in pairs]
