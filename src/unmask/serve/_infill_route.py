"""POST /v1/infill."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request

from unmask.serve._generation import (
    STREAM_RESPONSE,
    await_or_cancel,
    check_templates,
    close_templates,
    random_seed,
    sse_response,
    submit_generation,
)
from unmask.serve._response_schemas import InfillResponse
from unmask.serve._responses import InfillResponder
from unmask.serve._schemas import InfillRequest
from unmask.serve.models import ServedModels


def add_infill_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/infill", tags=["model"], response_model=InfillResponse, responses=STREAM_RESPONSE)
    async def infill(body: InfillRequest, request: Request) -> Any:
        """Fill the holes of a template.

        A hole `<mask:3..12>` or `<mask:*>` (0 to 32 tokens) has the length that the model chooses for the candidate.
        With `stream`, server-sent events: `canvas` once (with open holes, once for each candidate, and its `index`),
        then `step` after each step of each candidate (the draft as a template, and the changed tokens), `result` for
        each candidate, and `response`, which is the response without `stream`.
        """
        service = models.language_model(body.model)
        deadline = service.deadline(body.timeout)
        service.limits.check("alternatives", body.alternatives)
        given = body.template if body.template is not None else body.segments
        assert given is not None
        template = await asyncio.to_thread(service.codec.encode_template, given)
        seed = random_seed() if body.seed is None else body.seed
        check_templates(service, body, [template])
        guidance = await service.guidance(body, deadline)
        texts = await close_templates(service, body, [template], seed, deadline, request, guidance)
        handle = submit_generation(service, body, texts, seed, body.alternatives, deadline, guidance)
        responder = InfillResponder(service, texts, seed, template.is_open)
        if body.stream:
            return sse_response(responder.stream(handle.events()))
        return responder.response(await await_or_cancel(request, handle))
