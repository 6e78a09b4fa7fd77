"""Responses to generation and score requests, complete or streamed step by step."""

from __future__ import annotations

import itertools
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
    CompletionChoice,
    CompletionResponse,
    InfillCandidate,
    InfillResponse,
    ScoredToken,
    ScoreResponse,
    TimeBin,
    Usage,
)
from unmask.serve._schemas import CompletionRequest
from unmask.serve._text_codec import MaskedText, safe_stream_length, truncate_at_stop
from unmask.serve.service import Finished, Service

EventStream = AsyncIterator[tuple[int, Any]]
"""(index of the sequence, event)."""


class InfillResponder:
    """Builds the response to an infill request."""

    def __init__(self, service: Service, masked_text: MaskedText, seed: int, n: int) -> None:
        self.service, self.masked_text, self.seed, self.n = service, masked_text, seed, n
        self.codec, self.id, self.created = service.codec, response_id("infill"), int(time.time())

    def _candidate(self, sequence: GeneratedSequence, index: int) -> InfillCandidate:
        self.service.metrics.generated_tokens.inc(self.masked_text.num_masked)
        return self.codec.infill_candidate(sequence, self.masked_text, index, self.seed + index)

    def response(self, sequences: Sequence[GeneratedSequence]) -> InfillResponse:
        return self._response([self._candidate(sequence, index) for index, sequence in enumerate(sequences)])

    def _response(self, candidates: Sequence[InfillCandidate]) -> InfillResponse:
        return InfillResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            results=list(candidates),
            usage=usage(self.masked_text.num_prompt_tokens, self.n * self.masked_text.num_masked),
        )

    async def stream(self, events: EventStream) -> AsyncIterator[bytes]:
        mask, ids = self.codec.mask_id, self.masked_text.ids
        given = iter(self.codec.token_texts([id_ for id_ in ids if id_ != mask]))
        tokens = [None if id_ == mask else {"id": id_, "text": next(given)} for id_ in ids]
        canvas = {"id": self.id, "model": self.service.name, "seed": self.seed, "n": self.n, "tokens": tokens}
        yield sse_event("canvas", canvas)
        results: list[InfillCandidate | None] = [None] * self.n
        async for index, event in events:
            if isinstance(event, StepEvent):
                changes = [self._change_json(change) for change in event.events]
                draft = self.codec.render_draft(event.ids)
                yield sse_event("step", {"index": index, "step": event.step, "draft": draft, "changes": changes})
            elif isinstance(event, Finished):
                candidate = results[index] = self._candidate(event.result, index)
                yield sse_event("result", candidate)
        yield sse_event("response", self._response([result for result in results if result is not None]))

    def _change_json(self, event: TokenEvent) -> dict[str, Any]:
        return {
            "position": event.position,
            "id": event.id,
            "text": None if event.id is None else self.codec.decode_token(event.id),
            "logprob": event.logprob,
            "alternatives": [each.model_dump() for each in self.codec.alternatives(event)],
        }


class CompletionResponder:
    """Builds the response to a completion request; sequence i completes prompt i // n."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.service, self.request, self.codec = service, request, service.codec
        self.masked_texts = [self._masked_text(prompt) for prompt in _parse_prompts(request)]
        self.id, self.created = response_id("cmpl"), int(time.time())
        self.stops = [request.stop] if isinstance(request.stop, str) else request.stop or []

    def _masked_text(self, prompt: str | list[int]) -> MaskedText:
        """The prompt, the tokens to generate and the suffix."""
        limits, suffix, max_tokens = self.service.limits, self.request.suffix or "", self.request.max_tokens
        num_tokens = min(16, limits.max_tokens) if max_tokens is None else max_tokens
        ids = self.codec.tokenizer.encode(prompt) if isinstance(prompt, str) else self.codec.validate_ids(prompt)
        given = self.codec.completion_canvas(ids, 0, suffix).num_prompt_tokens
        # Checked before the masks are allocated: max_tokens may be any number.
        limits.check_context("max_tokens", given, num_tokens, self.service.max_length)
        return self.codec.completion_canvas(ids, num_tokens, suffix)

    def hit_stop(self, masked_text: MaskedText, ids: Sequence[int]) -> bool:
        """Whether the generated text has ended or contains a stop, so that the rest would be cut off."""
        generated, has_ended = self._generated_ids(masked_text, ids)
        if has_ended or not self.stops:
            return has_ended
        return truncate_at_stop(self.codec.decoded_prefix(generated), self.stops) is not None

    def _generated_ids(self, masked_text: MaskedText, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The ids of the completion up to a token that ends a text, and whether there is one with no mask before it.

        In front of a suffix the text goes on, and such a token is one as any other.
        """
        hole = _hole_ids(masked_text, ids)
        if self.request.suffix:
            return hole, False
        ends = self.service.model.end_ids
        before = list(itertools.takewhile(lambda id_: id_ not in ends, hole))
        has_ended = len(before) < len(hole) and self.codec.mask_id not in before
        return (before, True) if has_ended else (hole, False)

    def _choice(self, sequence: GeneratedSequence, index: int) -> CompletionChoice:
        masked_text = self.masked_texts[index // self.request.n]
        ids, has_ended = self._generated_ids(masked_text, sequence.ids)
        generated = self.codec.decoded_prefix(ids)
        self.service.metrics.generated_tokens.inc(masked_text.num_masked)
        truncated = truncate_at_stop(generated, self.stops)
        text = generated if truncated is None else truncated
        (first, _), logprobs = masked_text.holes[0], None
        if self.request.logprobs is not None:
            positions = [i for i in range(first, first + len(ids)) if sequence.ids[i] != self.codec.mask_id]
            logprobs = self.codec.logprobs(sequence, positions)
        return CompletionChoice(
            index=index,
            text=self._echo(masked_text) + text,
            logprobs=logprobs,
            finish_reason="length" if truncated is None and not has_ended else "stop",
        )

    def response(self, sequences: Sequence[GeneratedSequence]) -> CompletionResponse:
        choices = [self._choice(sequence, index) for index, sequence in enumerate(sequences)]
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=choices,
            usage=self._total_usage(),
        )

    def empty_sequences(self) -> list[GeneratedSequence]:
        """The results of a request for 0 tokens."""
        all_ids = [tuple(text.ids) for text in self.masked_texts for _ in range(self.request.n)]
        return [GeneratedSequence(ids, (None,) * len(ids), (0,) * len(ids)) for ids in all_ids]

    async def empty_events(self) -> EventStream:
        """The same as a stream."""
        for index, sequence in enumerate(self.empty_sequences()):
            yield index, Finished(sequence)

    async def stream(self, events: EventStream) -> AsyncIterator[bytes]:
        sent = [""] * (len(self.masked_texts) * self.request.n)
        is_final = not self.service.sampler(self.request).may_remask
        async for index, event in events:
            if isinstance(event, StepEvent):
                text = self._streamable_text(index, event.ids, sent[index]) if is_final else sent[index]
                yield self._chunk(index, text[len(sent[index]) :], None, self.codec.render_draft(event.ids))
                sent[index] = text
            elif isinstance(event, Finished):
                choice = self._choice(event.result, index)
                rest = choice.text[len(sent[index]) :]
                yield self._chunk(index, rest, choice.finish_reason, self.codec.render_draft(event.result.ids))
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

    def _streamable_text(self, index: int, ids: Sequence[int], sent: str) -> str:
        """The text up to the first mask, as far as it cannot become part of a stop; at least what was sent."""
        masked_text = self.masked_texts[index // self.request.n]
        text = self.codec.decoded_prefix(self._generated_ids(masked_text, ids)[0])
        if truncate_at_stop(text, self.stops) is not None:
            return sent
        text = text[: safe_stream_length(text, self.stops)]
        return self._echo(masked_text) + text if text else sent

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
        generated = self.request.n * sum(text.num_masked for text in self.masked_texts)
        return usage(sum(text.num_prompt_tokens for text in self.masked_texts), generated)


def _hole_ids(masked_text: MaskedText, ids: Sequence[int]) -> Sequence[int]:
    ((first, length),) = masked_text.holes
    return ids[first : first + length]


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


def _parse_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """One text, several texts, one list of ids, or several."""
    if isinstance(request.prompt, str):
        return [request.prompt]
    if not request.prompt:
        raise ValueError("the list of prompts is empty")
    prompts = [item for item in request.prompt if isinstance(item, str | list)]
    return prompts or [[item for item in request.prompt if isinstance(item, int)]]


def response_id(prefix: str) -> str:
    """A new id."""
    return f"{prefix}-{secrets.token_hex(12)}"


def sse_event(name: str, data: BaseModel | dict[str, Any]) -> bytes:
    """A server-sent event."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
