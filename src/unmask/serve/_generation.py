"""From a request that generates text to the engine and back: what its routes share."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from unmask.guidance import Guidance
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.serve._errors import ERROR_STATUS, to_error
from unmask.serve._jobs import generation_job, lengths_job
from unmask.serve._responses import sse_event
from unmask.serve._schemas import GenerationRequest
from unmask.serve._text_codec import EncodedTemplate, MaskedText
from unmask.serve.service import RequestHandle, Service

_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that has disconnected; it only appears in the metrics."""

STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {}}}, "description": "The response"}
}
"""The second content type of routes that can stream."""


async def close_templates(
    service: Service,
    request: GenerationRequest,
    templates: Sequence[EncodedTemplate],
    seed: int,
    deadline: float,
    http: Request,
    guidance: Guidance | None,
) -> list[MaskedText]:
    """`n` texts of each template, which must be within the limits; candidate i draws open lengths with seed + i.

    How probable the lengths are is asked of the network, as a job of its own for each template. Lengths that cannot
    match what the guidance asks of every hole are left out.
    """
    service.sampler(request)  # refuses what it must before the network is asked
    open_templates = [each for each in templates if each.is_open]
    possible = [await asyncio.to_thread(_possible_lengths, each, guidance) for each in open_templates]
    jobs = [lengths_job(_narrowed(*pair)) for pair in zip(open_templates, possible, strict=True)]
    found = await await_or_cancel(http, service.submit(jobs, deadline)) if jobs else []
    posteriors = (lengths.where(among) for lengths, among in zip(found, possible, strict=True))
    mask_id, texts = service.codec.mask_id, list[MaskedText]()
    for template in templates:
        if not template.is_open:
            texts += [template.close(mask_id)] * request.n
            continue
        lengths = next(posteriors)
        texts += [template.close(mask_id, lengths.draw(seed + index)) for index in range(request.n)]
    return texts


def submit_generation(
    service: Service,
    request: GenerationRequest,
    texts: Sequence[MaskedText],
    seed: int,
    alternatives: int,
    deadline: float,
    guidance: Guidance | None,
    hit_stop: Callable[[MaskedText, Sequence[int]], bool] | None = None,
) -> RequestHandle:
    """Queue a sequence for each text, `n` for each template; candidate i is sampled with seed + i."""
    sampler = service.sampler(request)
    can_stop = hit_stop is not None and not sampler.may_remask
    jobs = [
        generation_job(
            service.model,
            text.ids,
            sampler,
            seed + index % request.n,
            alternatives,
            guidance,
            partial(hit_stop, text) if can_stop and hit_stop else None,
        )
        for index, text in enumerate(texts)
    ]
    return service.submit(jobs, deadline, stream=request.stream)


def _possible_lengths(template: EncodedTemplate, guidance: Guidance | None) -> list[Sequence[int]]:
    """The lengths of each open hole that can match its pattern, in order; ValueError if there are none."""
    patterns = None if guidance is None else guidance.regex
    holes = [piece for piece in template.pieces if not isinstance(piece, list)]
    by_hole = list(patterns) if isinstance(patterns, tuple) else [patterns] * len(holes)
    if len(by_hole) != len(holes):
        raise ValueError(f"give one pattern, or one per hole ({len(holes)}); got {len(by_hole)}")
    possible, is_at_start, number = list[Sequence[int]](), True, 0
    for piece in template.pieces:
        pattern = None if isinstance(piece, list) else by_hole[number]
        number += not isinstance(piece, list)
        if isinstance(piece, range):
            # Where each hole has a pattern of its own, none may vanish.
            matching = [length for length in piece if length or not isinstance(patterns, tuple)]
            if isinstance(pattern, TokenDFA):
                state = pattern.text_start_state if is_at_start else pattern.inner_state
                matching = [length for length in pattern.match_lengths(state, piece[-1])[0] if length in piece]
            if not matching:
                what = pattern.subject if isinstance(pattern, TokenDFA) else "a pattern"
                raise ValueError(f"no hole of {piece[0]} to {piece[-1]} tokens can match {what}: give another range")
            possible.append(matching)
        is_at_start = is_at_start and piece in ([], 0)
    return possible


def _narrowed(template: EncodedTemplate, possible: Sequence[Sequence[int]]) -> EncodedTemplate:
    """The template with open holes from the smallest to the largest possible length."""
    left = iter(possible)
    pieces = [
        range(lengths[0], lengths[-1] + 1) if isinstance(piece, range) and (lengths := next(left)) else piece
        for piece in template.pieces
    ]
    return EncodedTemplate(tuple(pieces))


def check_templates(service: Service, request: GenerationRequest, templates: Sequence[EncodedTemplate]) -> None:
    """Refuse a request that is beyond the limits: before masks are allocated, as holes may be of any length."""
    service.limits.check("n", request.n * len(templates))
    for template in templates:
        given = template.num_given
        service.limits.check_context(request.length_field, given, template.longest - given, service.max_length)


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
    return _streamed(events, "text/event-stream", lambda error: sse_event("error", to_error(error)[1]))


def ndjson_response(lines: AsyncIterator[bytes]) -> StreamingResponse:
    """A response of lines of JSON, as Ollama's; an error ends it as the last line."""
    return _streamed(
        lines, "application/x-ndjson", lambda error: json_line({"error": to_error(error)[1].error.message})
    )


def json_line(value: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return f"{json.dumps(value, ensure_ascii=False)}\n".encode()


def _streamed(
    chunks: AsyncIterator[bytes], media_type: str, last_chunk: Callable[[Exception], bytes]
) -> StreamingResponse:
    async def with_errors() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield chunk
        except tuple(ERROR_STATUS) as error:  # the status line has been sent already
            yield last_chunk(error)

    return StreamingResponse(with_errors(), media_type=media_type)
