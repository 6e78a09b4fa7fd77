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
from unmask.serve.answers import Completing, Infilling, completed, event, scored
from unmask.serve.guard import Guard
from unmask.serve.limits import check, check_given, within
from unmask.serve.problems import STATUS, problem, told
from unmask.serve.reference import reference
from unmask.serve.rows import scoring, writing
from unmask.serve.schemas import (
    CompletionAnswer,
    CompletionRequest,
    ErrorAnswer,
    InfillAnswer,
    InfillRequest,
    ModelCard,
    ModelList,
    ScoreAnswer,
    ScoreRequest,
    Token,
    TokensAnswer,
    TokensRequest,
    Writing,
)
from unmask.serve.service import (
    Service,
    Ticket,
    new_seed,
    revises,
)
from unmask.serve.wording import HoledText

GONE = 499
"""What nginx calls a client that did not wait; nobody reads it."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer"}
}
"""What routes that can stream answer beside JSON."""


def create_app(
    service: Service,
    begin: Callable[[], None],
    hosts: Collection[str],
    token: str | None = None,
    origins: Collection[str] = (),
) -> Guard:
    """The application; `begin` is called once it runs, and sees to the model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        begin()
        yield

    app = FastAPI(
        title="unmask",
        version=__version__,
        description="Masked diffusion language models: infill, complete and score text.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=PROBLEMS,
        generate_unique_id_function=lambda route: route.name,
    )
    for kind in (HTTPException, RequestValidationError, *STATUS):
        app.add_exception_handler(kind, problem)
    _add_routes(app, service)
    _add_pages(app, token is not None)
    _describe(app, token is not None)
    return Guard(app, service.metrics, hosts, token, service.limits.body_bytes, origins)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """Whether the server is alive; 503 where its engine has ended or is stuck."""
        service.check()
        return {"status": "alive"}

    @app.get("/ready", tags=["server"])
    async def ready() -> dict[str, str]:
        """Whether the model is loaded; 503 until then."""
        _ = service.engine
        return {"status": "ready"}

    @app.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", tags=["model"])
    async def models() -> ModelList:
        """The model that is served, its samplers and limits."""
        return ModelList(data=[service.card()])

    @app.get("/v1/models/{model:path}", tags=["model"])
    async def retrieve_model(model: str) -> ModelCard:
        """The same for one model; there is one."""
        service.check_model(model)
        return service.card()

    @app.post("/v1/infill", tags=["model"], response_model=InfillAnswer, responses=STREAM)
    async def infill(asked: InfillRequest, request: Request) -> Any:
        """Fill the holes of a text.

        With `stream`, server-sent events: `canvas` once, then `step` after each step of each candidate
        (the draft, masks marked as in a template, and what changed), `result` for each candidate, and
        `answer`, which is what is answered without `stream`.
        """
        service.check_model(asked.model)
        check("alternatives", asked.alternatives, service.limits.alternatives)
        template = asked.template if asked.template is not None else asked.segments
        assert template is not None
        canvas = await asyncio.to_thread(service.wording.canvas, template)
        seed = new_seed() if asked.seed is None else asked.seed
        ticket = await _rows(service, asked, [canvas], seed, asked.alternatives)
        answer = Infilling(service, canvas, seed, asked.n)
        if asked.stream:
            return _streamed(answer.told(ticket.events()))
        rows = await _unless_gone(request, ticket)
        return answer.whole([answer.filled(row, index) for index, row in enumerate(rows)])

    @app.post("/v1/completions", tags=["model"], response_model=CompletionAnswer, responses=STREAM)
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        """Write `max_tokens` tokens after `prompt` and before `suffix`, as OpenAI's clients ask for it.

        With `stream`, text is sent as soon as nothing before it can change; every chunk also has the whole
        canvas as it is, in `draft`.
        """
        service.check_model(asked.model)
        canvases = await asyncio.to_thread(completed, service, asked)
        seed = new_seed() if asked.seed is None else asked.seed
        answer = Completing(service, asked, canvases)
        if asked.max_tokens == 0:
            _check_rows(service, asked, canvases)
            return (
                _streamed(answer.told(answer.nothing())) if asked.stream else answer.whole(answer.unwritten())
            )
        ticket = await _rows(service, asked, canvases, seed, asked.logprobs or 0, answer.enough)
        if asked.stream:
            return _streamed(answer.told(ticket.events()))
        return answer.whole(await _unless_gone(request, ticket))

    @app.post("/v1/tokens", tags=["model"])
    async def tokens(asked: TokensRequest) -> TokensAnswer:
        """Cut a text into the model's tokens, to know how long a hole must be."""
        service.check_model(asked.model)
        ids, pieces = await asyncio.to_thread(service.wording.cut_up, asked.text)
        return TokensAnswer(
            tokens=[Token(id=id_, text=piece) for id_, piece in zip(ids, pieces, strict=True)]
        )

    @app.post("/v1/score", tags=["model"])
    async def score(asked: ScoreRequest, request: Request) -> ScoreAnswer:
        """A bound on the nats of a text, with standard errors; the share of each token and part of time."""
        service.check_model(asked.model)
        draws = within("draws", asked.draws, 128, service.limits.draws)
        ids = await asyncio.to_thread(service.wording.tokenizer.encode, asked.text)
        check_given("text", len(ids), service.limits)
        deadline = service.deadline(asked.timeout)
        ticket = service.ticket([scoring(service.model, ids, draws, asked.seed)], deadline)
        (found,) = await _unless_gone(request, ticket)
        return scored(service, asked.text, ids, found)


def _add_pages(app: FastAPI, locked: bool) -> None:
    page = files("unmask.serve") / "page"
    scripts = sorted(file.name for file in page.iterdir() if file.name.endswith(".js"))

    def served(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
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
        app.add_api_route(path, served(name, kind), include_in_schema=False)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(reference(app.openapi(), str(request.base_url).rstrip("/"), locked))


def _describe(app: FastAPI, locked: bool) -> None:
    """Let the schema say that a token is needed, where one is."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        if locked:
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The server's --token."},
                "password": {"type": "http", "scheme": "basic", "description": "The same as a password."},
            }
            schema["security"] = [{"token": []}, {"password": []}]
            schema["paths"]["/health"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


async def _rows(
    service: Service,
    asked: Writing,
    canvases: Sequence[HoledText],
    seed: int,
    alternatives: int,
    enough: Callable[[HoledText, Sequence[int]], bool] | None = None,
) -> Ticket:
    """Send `n` rows for each canvas on their way."""
    deadline = service.deadline(asked.timeout)
    _check_rows(service, asked, canvases)
    sampler, guide = service.sampler(asked), await service.guide(asked, deadline)
    works = []
    for canvas in canvases:
        stop = (lambda ids, canvas=canvas: enough(canvas, ids)) if enough and not revises(sampler) else None
        for row in range(asked.n):
            more = {} if stop is None else {"enough": stop}
            works.append(writing(service.model, canvas.ids, sampler, seed + row, alternatives, guide, **more))
    return service.ticket(works, deadline, watched=asked.stream)


def _check_rows(service: Service, asked: Writing, canvases: Sequence[HoledText]) -> None:
    check("n", asked.n * len(canvases), service.limits.n)
    for canvas in canvases:
        service.check_canvas(canvas, asked.length_field)


async def _unless_gone(request: Request, ticket: Ticket) -> list[Any]:
    """The results; a client that goes away meanwhile frees its rows."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(ticket.results()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HTTPException(GONE, "the client has gone")
    finally:
        for each in (working, leaving):
            each.cancel()
        ticket.give_up()


def _streamed(events: AsyncIterator[bytes]) -> StreamingResponse:
    async def safely() -> AsyncIterator[bytes]:
        try:
            async for chunk in events:
                yield chunk
        except tuple(STATUS) as error:  # the status line has long been sent
            yield event("error", told(error)[1])

    return StreamingResponse(safely(), media_type="text/event-stream")
