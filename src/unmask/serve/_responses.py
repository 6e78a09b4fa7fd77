"""Responses to generation and score requests, complete or streamed step by step."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel

from unmask.data.corpus import TextStats
from unmask.diffusion.process import LeftToRight
from unmask.likelihood.score import TIME_BINS, Score
from unmask.serve._jobs import GeneratedSequence, StepEvent, TokenEvent
from unmask.serve._response_schemas import (
    InfillCandidate,
    InfillResponse,
    ScoredToken,
    ScoreResponse,
    TimeBin,
    Usage,
)
from unmask.serve._text_codec import MaskedText
from unmask.serve.service import Finished, Service

EventStream = AsyncIterator[tuple[int, Any]]
"""(index of the sequence, event)."""


class InfillResponder:
    """Builds the response to an infill request, whose candidates are these texts; alike, unless holes are open."""

    def __init__(self, service: Service, texts: Sequence[MaskedText], seed: int, is_open: bool) -> None:
        self.service, self.texts, self.seed, self.is_open = service, texts, seed, is_open
        self.codec, self.id, self.created = service.codec, response_id("infill"), int(time.time())

    def _candidate(self, sequence: GeneratedSequence, index: int) -> InfillCandidate:
        self.service.metrics.generated_tokens.inc(self.texts[index].num_masked)
        return self.codec.infill_candidate(sequence, self.texts[index], index, self.seed + index)

    def response(self, sequences: Sequence[GeneratedSequence]) -> InfillResponse:
        return self._response([self._candidate(sequence, index) for index, sequence in enumerate(sequences)])

    def _response(self, candidates: Sequence[InfillCandidate]) -> InfillResponse:
        return InfillResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            results=list(candidates),
            usage=usage(self.texts[0].num_prompt_tokens, sum(text.num_masked for text in self.texts)),
        )

    async def stream(self, events: EventStream) -> AsyncIterator[bytes]:
        if self.is_open:
            for index, text in enumerate(self.texts):
                yield sse_event("canvas", {"index": index, **self._canvas(text)})
        else:
            yield sse_event("canvas", self._canvas(self.texts[0]))
        results: list[InfillCandidate | None] = [None] * len(self.texts)
        async for index, event in events:
            if isinstance(event, StepEvent):
                changes = [self._change_json(change) for change in event.events]
                draft = self.codec.render_draft(event.ids)
                yield sse_event("step", {"index": index, "step": event.step, "draft": draft, "changes": changes})
            elif isinstance(event, Finished):
                candidate = results[index] = self._candidate(event.result, index)
                yield sse_event("result", candidate)
        yield sse_event("response", self._response([result for result in results if result is not None]))

    def _canvas(self, text: MaskedText) -> dict[str, Any]:
        mask = self.codec.mask_id
        given = iter(self.codec.token_texts([id_ for id_ in text.ids if id_ != mask]))
        tokens = [None if id_ == mask else {"id": id_, "text": next(given)} for id_ in text.ids]
        return {"id": self.id, "model": self.service.name, "seed": self.seed, "n": len(self.texts), "tokens": tokens}

    def _change_json(self, event: TokenEvent) -> dict[str, Any]:
        return {
            "position": event.position,
            "id": event.id,
            "text": None if event.id is None else self.codec.decode_token(event.id),
            "logprob": event.logprob,
            "alternatives": [each.model_dump() for each in self.codec.alternatives(event)],
        }


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def score_response(service: Service, text: str, ids: Sequence[int], score: Score) -> ScoreResponse:
    """The response to a score request."""
    figures: dict[str, Any] = Score(score.nats, score.variance, score.tokens, TextStats.from_text(text)).to_dict()
    totals = {
        name: figures[name]
        for name in ScoreResponse.model_fields
        if name in figures and name not in ("tokens", "by_time")
    }
    tokens = zip(ids, service.codec.token_texts(ids), score.token_nats, strict=True)
    return ScoreResponse(
        model=service.name,
        exact=isinstance(service.model.denoiser.process, LeftToRight),
        nats=score.nats,
        tokens=[ScoredToken(id=id_, text=token_text, nats=nats) for id_, token_text, nats in tokens],
        by_time=[
            TimeBin(start=index / TIME_BINS, end=(index + 1) / TIME_BINS, nats_per_token=nats, standard_error=error)
            for index, (nats, error) in enumerate(zip(score.by_time, score.by_time_error, strict=True))
        ],
        **totals,
    )


def response_id(prefix: str) -> str:
    """A new id."""
    return f"{prefix}-{secrets.token_hex(12)}"


def sse_event(name: str, data: BaseModel | dict[str, Any]) -> bytes:
    """A server-sent event."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
