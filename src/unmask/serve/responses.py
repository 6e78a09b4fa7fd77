"""From rows to answers, whole or told step by step."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel

from unmask.data.corpus import TextStats
from unmask.diffusion.process import LeftToRight
from unmask.likelihood.score import TIME_BINS, Score
from unmask.serve.jobs import GeneratedSequence, StepEvent, TokenEvent
from unmask.serve.limits import check_context_length
from unmask.serve.schemas import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    InfillCandidate,
    InfillResponse,
    ScoredToken,
    ScoreResponse,
    TimeBin,
    Usage,
)
from unmask.serve.service import Finished, Service, may_remask, response_id
from unmask.serve.text_codec import MaskedText, safe_stream_length, truncate_at_stop

_EventStream = AsyncIterator[tuple[int, Any]]
"""What rows tell, with their numbers."""


class InfillResponder:
    """The answer to a request for infilling."""

    def __init__(self, service: Service, masked_text: MaskedText, seed: int, n: int) -> None:
        self.service, self.masked_text, self.seed, self.n = service, masked_text, seed, n
        self.codec, self.id, self.created = service.codec, response_id("infill"), int(time.time())

    def candidate(self, sequence: GeneratedSequence, index: int) -> InfillCandidate:
        self.service.metrics.generated_tokens.inc(self.masked_text.num_masked)
        return self.codec.infill_candidate(sequence, self.masked_text, index, self.seed + index)

    def response(self, candidates: Sequence[InfillCandidate]) -> InfillResponse:
        return InfillResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            results=list(candidates),
            usage=_usage(self.masked_text.num_prompt_tokens, self.n * self.masked_text.num_masked),
        )

    async def stream(self, events: _EventStream) -> AsyncIterator[bytes]:
        mask, ids = self.codec.mask_id, self.masked_text.ids
        pieces = self.codec.token_texts([id_ for id_ in ids if id_ != mask])
        given = iter(pieces)
        shown = [None if id_ == mask else {"id": id_, "text": next(given)} for id_ in ids]
        start = {"id": self.id, "model": self.service.name, "seed": self.seed, "n": self.n, "tokens": shown}
        yield sse_event("canvas", start)
        results: list[InfillCandidate | None] = [None] * self.n
        async for index, news in events:
            if isinstance(news, StepEvent):
                changes = [self._change_json(mark) for mark in news.events]
                draft = self.codec.render_draft(news.ids)
                told = {"index": index, "step": news.step, "draft": draft, "changes": changes}
                yield sse_event("step", told)
            elif isinstance(news, Finished):
                filled = results[index] = self.candidate(news.result, index)
                yield sse_event("result", filled)
        yield sse_event("response", self.response([result for result in results if result is not None]))

    def _change_json(self, event: TokenEvent) -> dict[str, Any]:
        return {
            "position": event.position,
            "id": event.id,
            "text": None if event.id is None else self.codec.decode_token(event.id),
            "logprob": event.logprob,
            "alternatives": [each.model_dump() for each in self.codec.alternatives(event)],
        }


class CompletionResponder:
    """The answer to a request for completions: row i completes canvas i // n."""

    def __init__(self, service: Service, request: CompletionRequest, masked_texts: Sequence[MaskedText]) -> None:
        self.service, self.request, self.masked_texts, self.codec = (
            service,
            request,
            masked_texts,
            service.codec,
        )
        self.id, self.created = response_id("cmpl"), int(time.time())
        self.stops = [request.stop] if isinstance(request.stop, str) else request.stop or []

    def hit_stop(self, masked_text: MaskedText, ids: Sequence[int]) -> bool:
        """Whether what follows would be cut off anyway."""
        return (
            bool(self.stops)
            and truncate_at_stop(self.codec.decoded_prefix(_hole_ids(masked_text, ids)), self.stops) is not None
        )

    def choice(self, sequence: GeneratedSequence, index: int) -> CompletionChoice:
        canvas = self.masked_texts[index // self.request.n]
        inside = self.codec.decoded_prefix(_hole_ids(canvas, sequence.ids))
        self.service.metrics.generated_tokens.inc(canvas.num_masked)
        ended = truncate_at_stop(inside, self.stops)
        text = inside if ended is None else ended
        (first, length), logprobs = canvas.holes[0], None
        if self.request.logprobs is not None:
            places = [place for place in range(first, first + length) if sequence.ids[place] != self.codec.mask_id]
            logprobs = self.codec.logprobs(sequence, places)
        return CompletionChoice(
            index=index,
            text=self._echo(canvas) + text,
            logprobs=logprobs,
            finish_reason="length" if ended is None else "stop",
        )

    def response(self, sequences: Sequence[GeneratedSequence]) -> CompletionResponse:
        choices = [self.choice(row, index) for index, row in enumerate(sequences)]
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=choices,
            usage=self._total_usage(),
        )

    def empty_sequences(self) -> list[GeneratedSequence]:
        """The rows where no token is to be written."""
        rows = [canvas for canvas in self.masked_texts for _ in range(self.request.n)]
        return [GeneratedSequence(tuple(row.ids), (None,) * len(row.ids), (0,) * len(row.ids)) for row in rows]

    async def empty_events(self) -> _EventStream:
        """The same, as they are told."""
        for index, row in enumerate(self.empty_sequences()):
            yield index, Finished(row)

    async def stream(self, events: _EventStream) -> AsyncIterator[bytes]:
        rows = len(self.masked_texts) * self.request.n
        sent = [""] * rows
        settled = not may_remask(self.service.sampler(self.request))
        async for index, news in events:
            canvas = self.masked_texts[index // self.request.n]
            if isinstance(news, StepEvent):
                text = self.codec.decoded_prefix(_hole_ids(canvas, news.ids)) if settled else ""
                text = (
                    text[: safe_stream_length(text, self.stops)]
                    if truncate_at_stop(text, self.stops) is None
                    else sent[index]
                )
                whole = self._echo(canvas) + text if text else sent[index]
                yield self._chunk(index, whole[len(sent[index]) :], None, self.codec.render_draft(news.ids))
                sent[index] = whole
            elif isinstance(news, Finished):
                choice = self.choice(news.result, index)
                rest = choice.text[len(sent[index]) :]
                yield self._chunk(index, rest, choice.finish_reason, self.codec.render_draft(news.result.ids))
        if (self.request.stream_options or {}).get("include_usage"):
            last = CompletionResponse(
                id=self.id,
                created=self.created,
                model=self.service.name,
                choices=[],
                usage=self._total_usage(),
            )
            yield f"data: {last.model_dump_json()}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, reason: str | None, draft: str) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "draft": draft}
        chunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _echo(self, masked_text: MaskedText) -> str:
        return self.codec.tokenizer.decode(masked_text.ids[: masked_text.holes[0][0]]) if self.request.echo else ""

    def _total_usage(self) -> Usage:
        written = self.request.n * sum(canvas.num_masked for canvas in self.masked_texts)
        return _usage(sum(canvas.num_prompt_tokens for canvas in self.masked_texts), written)


def _hole_ids(masked_text: MaskedText, ids: Sequence[int]) -> Sequence[int]:
    ((first, length),) = masked_text.holes
    return ids[first : first + length]


def _usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def score_response(service: Service, text: str, ids: Sequence[int], score: Score) -> ScoreResponse:
    """The answer to a request for a score."""
    figures: dict[str, Any] = Score(score.nats, score.variance, score.tokens, TextStats.from_text(text)).to_dict()
    told = {name: figures[name] for name in ScoreResponse.model_fields if name in figures and name != "tokens"}
    pieces = zip(ids, service.codec.token_texts(ids), score.token_nats, strict=True)
    return ScoreResponse(
        model=service.name,
        exact=isinstance(service.model.denoiser.process, LeftToRight),
        nats=score.nats,
        tokens=[ScoredToken(id=id_, text=piece, nats=nats) for id_, piece, nats in pieces],
        by_time=[
            TimeBin(start=cell / TIME_BINS, end=(cell + 1) / TIME_BINS, nats_per_token=nats, standard_error=error)
            for cell, (nats, error) in enumerate(zip(score.by_time, score.by_time_error, strict=True))
        ],
        **{name: value for name, value in told.items() if name != "by_time"},
    )


def completion_canvases(service: Service, request: CompletionRequest) -> list[MaskedText]:
    """A canvas for each prompt."""
    wording = service.codec
    tokens = min(16, service.limits.max_tokens) if request.max_tokens is None else request.max_tokens
    canvases = []
    for prompt in _parse_prompts(request):
        ids = wording.tokenizer.encode(prompt) if isinstance(prompt, str) else wording.validate_ids(prompt)
        given = wording.completion_canvas(ids, 0, request.suffix or "").num_prompt_tokens
        check_context_length("max_tokens", given, tokens, service.max_length, service.limits)  # it may be any number
        canvases.append(wording.completion_canvas(ids, tokens, request.suffix or ""))
    return canvases


def _parse_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """One text, several texts, one list of ids, or several."""
    if isinstance(request.prompt, str):
        return [request.prompt]
    if not request.prompt:
        raise ValueError("the list of prompts is empty")
    texts = [each for each in request.prompt if isinstance(each, str | list)]
    return texts or [[each for each in request.prompt if isinstance(each, int)]]


def sse_event(name: str, data: BaseModel | dict[str, Any]) -> bytes:
    """A server-sent event."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
