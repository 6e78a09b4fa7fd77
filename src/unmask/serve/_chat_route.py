"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Request

from unmask.serve._chat import ChatResponder
from unmask.serve._chat_schemas import ChatRequest, ChatResponse
from unmask.serve._constraints import constrained
from unmask.serve._engine import DeadlineError, QueueFullError
from unmask.serve._generation import STREAM_RESPONSE, await_or_cancel, random_seed, sse_response, submit_generation
from unmask.serve.models import ServedModels
from unmask.serve.service import Service

_MAX_RENDERING = 64
"""Conversations that may wait for the process that renders templates."""


class _Renderings:
    """Conversations are rendered one after another, in a thread: a slow template takes none that others need."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def responder(self, service: Service, request: ChatRequest, seed: int) -> ChatResponder:
        if self._waiting >= _MAX_RENDERING:
            raise QueueFullError(retry_after=5)
        self._waiting += 1
        try:
            async with asyncio.timeout(service.deadline(request.timeout) - time.monotonic()), self._lock:
                return await asyncio.to_thread(ChatResponder, service, request, seed)
        except TimeoutError:
            raise DeadlineError("the deadline has passed while the conversation was being rendered") from None
        finally:
            self._waiting -= 1


def add_chat_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""
    renderings = _Renderings()

    @app.post("/v1/chat/completions", tags=["model"], response_model=ChatResponse, responses=STREAM_RESPONSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Any:
        """Answer a conversation in the model's chat template, compatible with OpenAI's clients.

        Messages are plain text, whatever special tokens they spell. With `stream`, text is sent in order, as soon as
        neither it nor anything before it can change. With `stream_drafts`, each step also sends a chunk without choices
        and with a `draft`: the `index` of the candidate, the `step`, and the `text` as a template, where `<mask:12>` is
        twelve tokens that are not written yet.
        """
        service = models.language_model(body.model)
        seed = random_seed() if body.seed is None else body.seed
        responder = await renderings.responder(service, body, seed)
        asked = constrained(body, responder.form)
        alternatives = body.top_logprobs or 0
        handle = await submit_generation(
            service, asked, [responder.masked_text], seed, alternatives, responder.hit_stop
        )
        if body.stream:
            return sse_response(responder.stream(handle.events()))
        return responder.response(await await_or_cancel(request, handle))
