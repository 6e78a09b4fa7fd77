"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from unmask.serve._chat import ChatResponder
from unmask.serve._chat_schemas import ChatRequest, ChatResponse
from unmask.serve._constraints import constrained
from unmask.serve._generation import STREAM_RESPONSE, await_or_cancel, random_seed, sse_response, submit_generation
from unmask.serve.models import ServedModels
from unmask.serve.service import RequestHandle, Service


def add_chat_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/chat/completions", tags=["model"], response_model=ChatResponse, responses=STREAM_RESPONSE)
    async def chat_completions(body: ChatRequest, request: Request) -> Any:
        """Answer a conversation in the model's chat template, compatible with OpenAI's clients.

        Messages are plain text, whatever special tokens they spell. With `stream`, text is sent in order, as soon as
        neither it nor anything before it can change. With `stream_drafts`, each step also sends a chunk without choices
        and with a `draft`: the `index` of the candidate, the `step`, and the `text` as a template, where `<mask:12>` is
        twelve tokens that are not written yet.
        """
        service = models.language_model(body.model)
        responder, handle = await submit_chat(service, body)
        if body.stream:
            return sse_response(responder.stream(handle.events()))
        return responder.response(await await_or_cancel(request, handle))


async def submit_chat(service: Service, body: ChatRequest) -> tuple[ChatResponder, RequestHandle]:
    """Render the conversation, and queue its answers."""
    deadline = service.deadline(body.timeout)
    service.limits.check("n", body.n)
    seed = random_seed() if body.seed is None else body.seed
    responder = await service.renderings.run(lambda: ChatResponder(service, body, seed), deadline)
    asked = constrained(body, responder.form)
    texts = [responder.masked_text] * body.n
    guidance = await service.guidance(asked, deadline)
    handle = submit_generation(
        service, asked, texts, seed, body.top_logprobs or 0, deadline, guidance, responder.hit_stop
    )
    return responder, handle
