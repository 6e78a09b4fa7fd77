"""The HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from unmask import __version__
from unmask.serve.api_docs import render_api_docs
from unmask.serve.errors import ERROR_STATUS, error_response, to_error
from unmask.serve.jobs import generation_job, scoring_job
from unmask.serve.limits import check_limit, check_prompt_tokens, checked_or_default
from unmask.serve.middleware import SecurityMiddleware
from unmask.serve.responses import (
    CompletionResponder,
    InfillResponder,
    completion_canvases,
    score_response,
    sse_event,
)
from unmask.serve.schemas import (
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    GenerationRequest,
    InfillRequest,
    InfillResponse,
    ModelCard,
    ModelList,
    ScoreRequest,
    ScoreResponse,
    Token,
    TokenizeRequest,
    TokenizeResponse,
)
from unmask.serve.service import (
    RequestHandle,
    Service,
    may_remask,
    random_seed,
)
from unmask.serve.text_codec import MaskedText

_CLIENT_CLOSED_REQUEST = 499
"""What nginx calls a client that did not wait; nobody reads it."""

_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
}
_STREAM_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer"}
}
"""What routes that can stream answer beside JSON."""


def create_app(
    service: Service,
    on_startup: Callable[[], None],
    allowed_hosts: Collection[str],
    token: str | None = None,
    allowed_origins: Collection[str] = (),
) -> SecurityMiddleware:
    """The application; `begin` is called once it runs, and sees to the model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        on_startup()
        yield

    app = FastAPI(
        title="unmask",
        version=__version__,
        description="Masked diffusion language models: infill, complete and score text.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERROR_RESPONSES,
        generate_unique_id_function=lambda route: route.name,
    )
    for kind in (HTTPException, RequestValidationError, *ERROR_STATUS):
        app.add_exception_handler(kind, error_response)
    _add_routes(app, service)
    _add_pages(app, token is not None)
    _describe_auth(app, token is not None)
    return SecurityMiddleware(app, service.metrics, allowed_hosts, token, service.limits.body_bytes, allowed_origins)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """Whether the server is alive; 503 where its engine has ended or is stuck."""
        service.check_alive()
        return {"status": "alive"}

    @app.get("/ready", tags=["server"])
    async def ready() -> dict[str, str]:
        """Whether the model is loaded; 503 until then."""
        _ = service.engine
        return {"status": "ready"}

    @app.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures in the text format of Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", tags=["model"])
    async def models() -> ModelList:
        """The model that is served, its samplers and limits."""
        return ModelList(data=[service.model_card()])

    @app.get("/v1/models/{model:path}", tags=["model"])
    async def retrieve_model(model: str) -> ModelCard:
        """The same for one model; there is one."""
        service.check_model(model)
        return service.model_card()

    @app.post("/v1/infill", tags=["model"], response_model=InfillResponse, responses=_STREAM_RESPONSE)
    async def infill(body: InfillRequest, request: Request) -> Any:
        """Fill the holes of a text.

        With `stream`, server-sent events: `canvas` once, then `step` after each step of each candidate
        (the draft, masks marked as in a template, and what changed), `result` for each candidate, and
        `response`, which is what is answered without `stream`.
        """
        service.check_model(body.model)
        check_limit("alternatives", body.alternatives, service.limits.alternatives)
        template = body.template if body.template is not None else body.segments
        assert template is not None
        canvas = await asyncio.to_thread(service.codec.encode_template, template)
        seed = random_seed() if body.seed is None else body.seed
        ticket = await _submit_generation(service, body, [canvas], seed, body.alternatives)
        answer = InfillResponder(service, canvas, seed, body.n)
        if body.stream:
            return _sse_response(answer.stream(ticket.events()))
        rows = await _await_or_cancel(request, ticket)
        return answer.response([answer.candidate(row, index) for index, row in enumerate(rows)])

    @app.post("/v1/completions", tags=["model"], response_model=CompletionResponse, responses=_STREAM_RESPONSE)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Write `max_tokens` tokens after `prompt` and before `suffix`, as OpenAI's clients ask for it.

        With `stream`, text is sent as soon as nothing before it can change; every chunk also has the whole
        canvas as it is, in `draft`.
        """
        service.check_model(body.model)
        canvases = await asyncio.to_thread(completion_canvases, service, body)
        seed = random_seed() if body.seed is None else body.seed
        answer = CompletionResponder(service, body, canvases)
        if body.max_tokens == 0:
            _check_generation(service, body, canvases)
            return (
                _sse_response(answer.stream(answer.empty_events()))
                if body.stream
                else answer.response(answer.empty_sequences())
            )
        ticket = await _submit_generation(service, body, canvases, seed, body.logprobs or 0, answer.hit_stop)
        if body.stream:
            return _sse_response(answer.stream(ticket.events()))
        return answer.response(await _await_or_cancel(request, ticket))

    @app.post("/v1/tokenize", tags=["model"])
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Cut a text into the model's tokens, to know how long a hole must be."""
        service.check_model(body.model)
        ids, pieces = await asyncio.to_thread(service.codec.tokenize, body.text)
        return TokenizeResponse(tokens=[Token(id=id_, text=piece) for id_, piece in zip(ids, pieces, strict=True)])

    @app.post("/v1/score", tags=["model"])
    async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
        """A bound on the nats of a text, with standard errors; the share of each token and part of time."""
        service.check_model(body.model)
        draws = checked_or_default("draws", body.draws, 128, service.limits.draws)
        ids = await asyncio.to_thread(service.codec.tokenizer.encode, body.text)
        check_prompt_tokens("text", len(ids), service.limits)
        deadline = service.deadline(body.timeout)
        ticket = service.submit([scoring_job(service.model, ids, draws, body.seed)], deadline)
        (found,) = await _await_or_cancel(request, ticket)
        return score_response(service, body.text, ids, found)


def _add_pages(app: FastAPI, requires_token: bool) -> None:
    page = files("unmask.serve") / "page"
    scripts = sorted(file.name for file in page.iterdir() if file.name.endswith(".js"))

    def static_route(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (page / name).read_bytes()

        async def route() -> Response:
            return Response(content, media_type=kind)

        return route

    for path, name, kind in (
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/page.css", "page.css", "text/css; charset=utf-8"),
        ("/favicon.ico", "icon.svg", "image/svg+xml"),
        *((f"/{name}", name, "text/javascript; charset=utf-8") for name in scripts),
    ):
        app.add_api_route(path, static_route(name, kind), include_in_schema=False)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(render_api_docs(app.openapi(), str(request.base_url).rstrip("/"), requires_token))


def _describe_auth(app: FastAPI, requires_token: bool) -> None:
    """Let the schema say that a token is needed, where one is."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        if requires_token:
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The server's --token."},
                "password": {"type": "http", "scheme": "basic", "description": "The same as a password."},
            }
            schema["security"] = [{"token": []}, {"password": []}]
            schema["paths"]["/health"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _submit_generation(
    service: Service,
    request: GenerationRequest,
    masked_texts: Sequence[MaskedText],
    seed: int,
    alternatives: int,
    hit_stop: Callable[[MaskedText, Sequence[int]], bool] | None = None,
) -> RequestHandle:
    """Send `n` rows for each canvas on their way."""
    deadline = service.deadline(request.timeout)
    _check_generation(service, request, masked_texts)
    sampler, guide = service.sampler(request), await service.guidance(request, deadline)
    works = []
    for canvas in masked_texts:
        stop = (lambda ids, canvas=canvas: hit_stop(canvas, ids)) if hit_stop and not may_remask(sampler) else None
        for row in range(request.n):
            more = {} if stop is None else {"should_stop": stop}
            works.append(generation_job(service.model, canvas.ids, sampler, seed + row, alternatives, guide, **more))
    return service.submit(works, deadline, stream=request.stream)


def _check_generation(service: Service, request: GenerationRequest, masked_texts: Sequence[MaskedText]) -> None:
    check_limit("n", request.n * len(masked_texts), service.limits.n)
    for canvas in masked_texts:
        service.check_canvas(canvas, request.length_field)


async def _await_or_cancel(request: Request, handle: RequestHandle) -> list[Any]:
    """The results; a client that goes away meanwhile frees its rows."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(handle.results()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client has gone")
    finally:
        for each in (working, leaving):
            each.cancel()
        handle.cancel()


def _sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    async def safely() -> AsyncIterator[bytes]:
        try:
            async for chunk in events:
                yield chunk
        except tuple(ERROR_STATUS) as error:  # the status line has long been sent
            yield sse_event("error", to_error(error)[1])

    return StreamingResponse(safely(), media_type="text/event-stream")
