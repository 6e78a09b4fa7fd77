"""POST /v1/completions, compatible with OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request

from unmask.serve._completions import CompletedText, CompletionRun, TextPart
from unmask.serve._generation import STREAM_RESPONSE, sse_response
from unmask.serve._response_schemas import CompletionChoice, CompletionResponse
from unmask.serve._responses import response_id
from unmask.serve._schemas import CompletionRequest
from unmask.serve._text_codec import EncodedTemplate, completion_template
from unmask.serve.models import ServedModels
from unmask.serve.service import Service

_DEFAULT_MAX_TOKENS = 16


def add_completion_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/completions", tags=["model"], response_model=CompletionResponse, responses=STREAM_RESPONSE)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Generate `max_tokens` tokens after `prompt` and before `suffix`, compatible with OpenAI's clients.

        With `suffix` and `min_tokens`, the model chooses the number of tokens: their probabilities are those of the
        text around the hole. With `stream`, text is sent as soon as nothing before it can change; every chunk also has
        the current draft, as a template, in `draft`.
        """
        service = models.language_model(body.model)
        deadline = service.deadline(body.timeout)
        templates = await asyncio.to_thread(_templates, service, body)
        responder = _Responder(await CompletionRun.start(service, body, templates, deadline, request), body)
        if body.stream:
            return sse_response(responder.stream())
        return responder.response(await responder.run.results(request))


def _templates(service: Service, request: CompletionRequest) -> list[EncodedTemplate]:
    """The prompts, each with a hole and the suffix."""
    codec = service.codec
    most = min(_DEFAULT_MAX_TOKENS, service.limits.max_tokens) if request.max_tokens is None else request.max_tokens
    is_open = request.suffix and request.min_tokens is not None and request.min_tokens < most
    length = range(request.min_tokens or 0, most + 1) if is_open else most
    suffix = codec.tokenizer.encode(request.suffix) if request.suffix else []
    return [completion_template(codec.encode_prompt(prompt), length, suffix) for prompt in _parse_prompts(request)]


def _parse_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """One text, several texts, one list of ids, or several."""
    if isinstance(request.prompt, str):
        return [request.prompt]
    if not request.prompt:
        raise ValueError("the list of prompts is empty")
    prompts = [item for item in request.prompt if isinstance(item, str | list)]
    return prompts or [[item for item in request.prompt if isinstance(item, int)]]


class _Responder:
    """Builds the response to a completion request."""

    def __init__(self, run: CompletionRun, request: CompletionRequest) -> None:
        self.run, self.request, self.codec = run, request, run.codec
        self.id, self.created = response_id("cmpl"), int(time.time())

    def response(self, completed: Sequence[CompletedText]) -> CompletionResponse:
        """The whole response."""
        return self._response([self._choice(each) for each in completed])

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.run.service.name,
            choices=choices,
            usage=self.run.usage(),
        )

    def _choice(self, completed: CompletedText) -> CompletionChoice:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = self.codec.logprobs(completed.sequence, self.run.written(completed))
        return CompletionChoice(
            index=completed.index,
            text=self._echo(completed.index) + completed.text,
            logprobs=logprobs,
            finish_reason=completed.finish_reason,
        )

    async def stream(self) -> AsyncIterator[bytes]:
        """The response in chunks."""
        echoes = {index: self._echo(index) for index in range(len(self.run.texts))}
        async for part in self.run.parts():
            text = part.text
            if text or part.completed is not None:
                text = echoes.pop(part.index, "") + text
            yield self._chunk(part, text)
        if (self.request.stream_options or {}).get("include_usage"):
            yield f"data: {self._response([]).model_dump_json()}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _chunk(self, part: TextPart, text: str) -> bytes:
        reason = None if part.completed is None else part.completed.finish_reason
        draft = self.codec.render_draft(part.ids)
        choice = {"index": part.index, "text": text, "logprobs": None, "finish_reason": reason, "draft": draft}
        chunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.run.service.name,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _echo(self, index: int) -> str:
        return self.codec.tokenizer.decode(self.run.prompt_ids(index)) if self.request.echo else ""
