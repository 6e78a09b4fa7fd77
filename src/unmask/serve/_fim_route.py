"""POST /v1/fim/completions, as Mistral's clients send it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field, model_validator

from unmask.serve._chat_schemas import ChatChoice, ChatMessage, ChatResponse
from unmask.serve._compat import Dialect
from unmask.serve._completions import CompletionRun
from unmask.serve._fim import Gap
from unmask.serve._generation import STREAM_RESPONSE, sse_response
from unmask.serve._responses import response_id
from unmask.serve._schemas import TextRequest, check_lengths
from unmask.serve.models import ServedModels


class FimRequest(TextRequest):
    """A request to fill the middle; `random_seed` is the same as `seed`, and `steps`, `sampler` and others are ours."""

    dialect = Dialect(aliases={"random_seed": "seed"})

    n: int = Field(1, ge=1, le=1, description="One completion.")
    prompt: str = Field(description="The text before the hole.")
    suffix: str | None = Field(None, description="The text after it.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="The most tokens: before a suffix 32 at most, unless `min_tokens` is given; else 256, or what there"
        " is room for, if not given.",
    )
    min_tokens: int | None = Field(None, ge=0, description="The fewest tokens in front of a suffix; 0 if not given.")

    @property
    def may_end(self) -> bool:
        return not self.suffix

    @model_validator(mode="after")
    def _check_lengths(self) -> FimRequest:
        check_lengths("min_tokens", self.min_tokens, "max_tokens", self.max_tokens)
        return self


def add_fim_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/fim/completions", tags=["model"], response_model=ChatResponse, responses=STREAM_RESPONSE)
    async def fim_completions(body: FimRequest, request: Request) -> Any:
        """Fill the hole between `prompt` and `suffix`, compatible with Mistral's clients.

        The model chooses how many tokens the hole has. With `stream`, text is sent in order, as soon as neither it nor
        anything before it can change.
        """
        service = models.language_model(body.model)
        deadline = service.deadline(body.timeout)
        gap = Gap(body.prompt, body.suffix or "", body.min_tokens, body.max_tokens)
        template = await asyncio.to_thread(gap.template, service)
        run = await CompletionRun.start(service, body, [template], deadline, request)
        if body.stream:
            return sse_response(_stream(run))
        (completed,) = await run.results(request)
        message = ChatMessage(content=completed.text, tool_calls=None)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=completed.finish_reason)
        return ChatResponse(
            id=response_id("fim"),
            created=int(time.time()),
            model=service.name,
            choices=[choice],
            usage=run.usage(),
            seed=run.seed,
        )


async def _stream(run: CompletionRun) -> AsyncIterator[bytes]:
    """The response in chunks; the last one has the token counts."""
    head = {"id": response_id("fim"), "object": "chat.completion.chunk", "created": int(time.time())}
    head |= {"model": run.service.name}
    async for part in run.parts():
        done = part.completed
        if not (part.text or done):
            continue
        reason = None if done is None else done.finish_reason
        choice = {"index": 0, "delta": {"role": "assistant", "content": part.text}, "finish_reason": reason}
        chunk = {**head, "choices": [choice], "usage": None if done is None else run.usage().model_dump()}
        yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
    yield b"data: [DONE]\n\n"
