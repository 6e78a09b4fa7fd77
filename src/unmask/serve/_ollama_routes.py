"""The routes of Ollama's server: /api/generate, /api/chat, /api/embed, and what its clients ask of models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from unmask import __version__
from unmask.serve._chat import ChatResponder
from unmask.serve._chat_route import submit_chat
from unmask.serve._chat_schemas import ChatChoice, ChatRequest
from unmask.serve._completions import CompletionRun
from unmask.serve._embeddings import embed
from unmask.serve._generation import await_or_cancel, json_line, ndjson_response
from unmask.serve._ollama_schemas import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from unmask.serve._response_schemas import ERROR_STATUSES, OllamaErrorResponse
from unmask.serve.models import ServedModels
from unmask.serve.service import RequestHandle, Service

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": OllamaErrorResponse} for status in ERROR_STATUSES}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/x-ndjson": {"schema": {}}}, "description": "The response"},
    **_ERRORS,
}
_TAG = "Ollama"


def add_ollama_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes."""

    @app.post("/api/generate", tags=[_TAG], responses=_STREAM)
    async def ollama_generate(body: OllamaGenerateRequest, request: Request) -> Any:
        """Continue `prompt`, or fill the hole before `suffix`, compatible with Ollama's clients.

        The model chooses how many tokens a hole before a suffix has. A model with a chat template answers `prompt` as a
        user's message, unless `raw` is true or there is a suffix. Of a text that is too long, what is far from the hole
        is not read. Lines of JSON are streamed unless `stream` is false.
        """
        service = models.language_model(_name(body.model))
        reply = _Reply(service, "response")
        if not body.prompt and not body.suffix:
            return reply.loaded()
        chats = service.model.chat_template is not None and not body.raw and not body.suffix
        if body.system is not None and not chats:
            raise ValueError("a system message needs a model with a chat template, no suffix, and raw false")
        if chats:
            return await _chat(reply, body.as_chat(), request)
        deadline = service.deadline(body.timeout)
        template, _ = await asyncio.to_thread(body.gap.fitting_template, service)
        run = await CompletionRun.start(service, body, [template], deadline, request)
        reply.started = time.perf_counter()
        if body.stream:
            return ndjson_response(_stream_completion(run, reply))
        (completed,) = await run.results(request)
        return reply.last(
            completed.text, completed.finish_reason, run.texts[0].num_prompt_tokens, len(run.written(completed))
        )

    @app.post("/api/chat", tags=[_TAG], responses=_STREAM)
    async def ollama_chat(body: OllamaChatRequest, request: Request) -> Any:
        """Answer a conversation in the model's chat template, compatible with Ollama's clients.

        Lines of JSON are streamed unless `stream` is false.
        """
        service = models.language_model(_name(body.model))
        reply = _Reply(service, "message")
        return await _chat(reply, body, request) if body.messages else reply.loaded()

    @app.post("/api/embed", tags=[_TAG], responses=_ERRORS)
    async def ollama_embed(body: OllamaEmbedRequest, request: Request) -> dict[str, Any]:
        """A vector for each text, as `/v1/embeddings`, compatible with Ollama's clients."""
        service = models.language_model(_name(body.model))
        start, texts = time.perf_counter(), [body.input] if isinstance(body.input, str) else body.input
        vectors, num_tokens = await embed(service, texts, body.timeout, request)
        return {
            "model": service.name,
            "embeddings": [[float(value) for value in vector] for vector in vectors],
            "total_duration": _nanoseconds(start, time.perf_counter()),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }

    _add_model_routes(app, models)


def _add_model_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/api/version", tags=[_TAG], responses=_ERRORS)
    async def ollama_version() -> dict[str, str]:
        """The version of this server."""
        return {"version": __version__}

    @app.get("/api/tags", tags=[_TAG], responses=_ERRORS)
    async def ollama_tags() -> dict[str, Any]:
        """The models that are loaded, as Ollama's clients list models."""
        return {"models": [_listed(service) for service in _ready(models)]}

    @app.get("/api/ps", tags=[_TAG], responses=_ERRORS)
    async def ollama_ps() -> dict[str, Any]:
        """The models in memory: all that are loaded."""
        return {"models": [{**_listed(each), "context_length": each.max_length} for each in _ready(models)]}

    @app.post("/api/show", tags=[_TAG], responses=_ERRORS)
    async def ollama_show(body: OllamaShowRequest) -> dict[str, Any]:
        """What the model can do: `insert` is to fill the hole before a suffix."""
        service = models.language_model(_name(body.model))
        model = service.model
        chats, inserts = model.chat_template is not None, model.uses_right_context
        able = {"completion": True, "insert": inserts, "embedding": True, "tools": chats}
        return {
            "modelfile": "",
            "parameters": f"num_ctx {service.max_length}",
            # Editors take a template that reads .Suffix for the sign of a model that fills holes.
            "template": "{{ .Prompt }}{{ .Suffix }}" if inserts else "{{ .Prompt }}",
            "details": _listed(service)["details"],
            "model_info": {
                "general.architecture": "unmask",
                "general.parameter_count": service.model_card().num_parameters,
                "unmask.context_length": service.max_length,
                "unmask.vocab_size": model.vocab.size,
            },
            "capabilities": [name for name, can in able.items() if can],
        }


class _Reply:
    """Lines of one answer in Ollama's form; `kind` is where its text is."""

    def __init__(self, service: Service, kind: str) -> None:
        self.service, self.kind = service, kind
        self.arrived = self.started = time.perf_counter()

    def part(self, text: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A part of the text."""
        content: Any = text
        if self.kind == "message":
            content = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        return {"model": self.service.name, "created_at": _now(), self.kind: content, "done": False}

    def last(
        self, text: str, reason: str, num_given: int, num_written: int, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """The end: with the whole text, or without what was sent before."""
        end = time.perf_counter()
        return {
            **self.part(text, calls),
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(self.arrived, end),
            "load_duration": 0,
            "prompt_eval_count": num_given,
            "prompt_eval_duration": _nanoseconds(self.arrived, self.started),
            "eval_count": num_written,
            "eval_duration": _nanoseconds(self.started, end),
        }

    def loaded(self) -> dict[str, Any]:
        """The answer to a request without a text, by which clients load a model."""
        _ = self.service.model
        return {**self.part(""), "done": True, "done_reason": "load"}


async def _stream_completion(run: CompletionRun, reply: _Reply) -> AsyncIterator[bytes]:
    async for part in run.parts():
        if part.text:
            yield json_line(reply.part(part.text))
        if part.completed is not None:
            given, written = run.texts[0].num_prompt_tokens, len(run.written(part.completed))
            yield json_line(reply.last("", part.completed.finish_reason, given, written))


async def _chat(reply: _Reply, body: ChatRequest, request: Request) -> Any:
    responder, handle = await submit_chat(reply.service, body)
    reply.started = time.perf_counter()
    if body.stream:
        return ndjson_response(_stream_chat(responder, handle, reply))
    answer = responder.response(await await_or_cancel(request, handle))
    (choice,) = answer.choices
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens
    return reply.last(choice.message.content or "", _done_reason(choice), *counts, _calls(choice))


async def _stream_chat(responder: ChatResponder, handle: RequestHandle, reply: _Reply) -> AsyncIterator[bytes]:
    async for part in responder.parts(handle.events()):
        calls = None if part.choice is None else _calls(part.choice)
        if part.text or calls:
            yield json_line(reply.part(part.text, calls))
        if part.choice is not None:
            given = responder.masked_text.num_prompt_tokens
            yield json_line(reply.last("", _done_reason(part.choice), given, part.num_tokens))


def _calls(choice: ChatChoice) -> list[dict[str, Any]] | None:
    """The calls of an answer, with their arguments as objects."""
    calls = choice.message.tool_calls or []
    return [
        {"function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}} for call in calls
    ] or None


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; what is not an object is kept as text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _done_reason(choice: ChatChoice) -> str:
    return "length" if choice.finish_reason == "length" else "stop"


def _ready(models: ServedModels) -> Sequence[Service]:
    """The language models that are loaded; all of them, which say what they wait for, if none is."""
    return [service for service in models.language_models if service.ready] or models.language_models


def _listed(service: Service) -> dict[str, Any]:
    card = service.model_card()
    weights = list(service.model.denoiser.parameters())
    details = {
        "parent_model": "",
        "format": "unmask",
        "family": card.objective,
        "families": [card.objective],
        "parameter_size": f"{card.num_parameters / 1e6:.1f}M",
        "quantization_level": str(service.model.denoiser.weights_dtype),
    }
    return {
        "name": service.name,
        "model": service.name,
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "size": sum(weight.numel() * weight.element_size() for weight in weights),
        "digest": "",
        "details": details,
    }


def _name(model: str | None) -> str | None:
    """The name of a model, without the tag that Ollama's clients may add."""
    return None if model is None else model.removesuffix(":latest")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(start: float, end: float) -> int:
    return round(1e9 * (end - start))
