"""From a request that generates text to the engine and back: what its routes share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from unmask.serve._errors import ERROR_STATUS, to_error
from unmask.serve._jobs import generation_job
from unmask.serve._responses import sse_event
from unmask.serve._schemas import GenerationRequest
from unmask.serve._text_codec import MaskedText
from unmask.serve.service import RequestHandle, Service

_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has disconnected; it only appears in the metrics."""

STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The response"}
}
"""The second content type of routes that can stream."""


async def submit_generation(
    service: Service,
    request: GenerationRequest,
    masked_texts: Sequence[MaskedText],
    seed: int,
    alternatives: int,
    hit_stop: Callable[[MaskedText, Sequence[int]], bool] | None = None,
) -> RequestHandle:
    """Queue `n` sequences for each text; candidate i is sampled with seed + i."""
    deadline = service.deadline(request.timeout)
    check_generation(service, request, masked_texts)
    sampler, guidance = service.sampler(request), await service.guidance(request, deadline)
    can_stop = hit_stop is not None and not sampler.may_remask
    jobs = [
        generation_job(
            service.model,
            text.ids,
            sampler,
            seed + index,
            alternatives,
            guidance,
            partial(hit_stop, text) if can_stop and hit_stop else None,
        )
        for text in masked_texts
        for index in range(request.n)
    ]
    return service.submit(jobs, deadline, stream=request.stream)


def check_generation(service: Service, request: GenerationRequest, masked_texts: Sequence[MaskedText]) -> None:
    """Refuse a request that is beyond the limits."""
    service.limits.check("n", request.n * len(masked_texts))
    for text in masked_texts:
        service.check_canvas(text, request.length_field)


def random_seed() -> int:
    """A seed for a request without one; it is part of the response, so that the text can be generated again."""
    return secrets.randbelow(1 << 31)


async def await_or_cancel(request: Request, handle: RequestHandle) -> list[Any]:
    """The results; if the client disconnects, the request is cancelled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    results, disconnect = asyncio.ensure_future(handle.results()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((results, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if results.done():
            return results.result()
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client has disconnected")
    finally:
        for future in (results, disconnect):
            future.cancel()
        handle.cancel()


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A response of server-sent events; an error ends it as the last event."""

    async def with_errors() -> AsyncIterator[bytes]:
        try:
            async for chunk in events:
                yield chunk
        except tuple(ERROR_STATUS) as error:  # the status line has been sent already
            yield sse_event("error", to_error(error)[1])

    return StreamingResponse(with_errors(), media_type="text/event-stream")
