"""The HTTP API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from unmask import __version__
from unmask.data.textsize import TextSize
from unmask.diffusion.process import LeftToRight
from unmask.evaluation.score import CELLS, Score
from unmask.serve.engine import BusyError, ClosedError, LateError
from unmask.serve.guard import Guard
from unmask.serve.limits import LimitError, check, within
from unmask.serve.reference import reference
from unmask.serve.rows import Mark, Row, Step, scoring, writing
from unmask.serve.schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    ErrorAnswer,
    Filled,
    InfillAnswer,
    InfillRequest,
    ModelList,
    Problem,
    ScoreAnswer,
    ScoredToken,
    ScoreRequest,
    TimeShare,
    Token,
    TokensAnswer,
    TokensRequest,
    Usage,
    Writing,
)
from unmask.serve.service import (
    Ended,
    NotReadyError,
    Service,
    Ticket,
    UnknownModelError,
    new_id,
    new_seed,
    revises,
)
from unmask.serve.wording import Canvas, cut, sure_length
from unmask.types import DamagedError

GONE = 499
"""What nginx calls a client that did not wait; nobody reads it."""

STATUS: dict[type[Exception], tuple[int, str]] = {
    LimitError: (400, "invalid_request_error"),
    UnknownModelError: (404, "invalid_request_error"),
    DamagedError: (500, "server_error"),
    ValueError: (400, "invalid_request_error"),
    BusyError: (429, "rate_limit_error"),
    NotReadyError: (503, "server_error"),
    ClosedError: (503, "server_error"),
    LateError: (504, "timeout"),
    MemoryError: (503, "server_error"),
}
"""What each exception is answered with; the first that fits counts."""

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504)
}


def create_app(
    service: Service,
    begin: Callable[[], None],
    hosts: Collection[str],
    token: str | None = None,
    patience: float = 30.0,
) -> Guard:
    """The application; `begin` is called once it runs, and sees to the model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        begin()
        yield
        await asyncio.to_thread(service.close, patience)

    app = FastAPI(
        title="unmask",
        version=__version__,
        description="Masked diffusion language models: infill, complete and score text.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=PROBLEMS,
    )
    for kind in (HTTPException, RequestValidationError, *STATUS):
        app.add_exception_handler(kind, _problem)
    _add_routes(app, service)
    _add_pages(app)
    return Guard(app, service.metrics, hosts, token, service.limits.body_bytes)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["server"])
    async def health() -> dict[str, str]:
        """Whether the server is alive."""
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

    @app.post("/v1/infill", tags=["model"], response_model=InfillAnswer)
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
        ticket = _rows(service, asked, [canvas], seed, asked.alternatives)
        answer = _Infilling(service, canvas, seed, asked.n)
        if asked.stream:
            return _streamed(answer.told(ticket))
        rows = await _unless_gone(request, ticket)
        return answer.whole([answer.filled(row, index) for index, row in enumerate(rows)])

    @app.post("/v1/completions", tags=["model"], response_model=CompletionAnswer)
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        """Write `max_tokens` tokens after `prompt` and before `suffix`, as OpenAI's clients ask for it.

        With `stream`, text is sent as soon as nothing before it can change; every chunk also has the whole
        canvas as it is, in `draft`.
        """
        service.check_model(asked.model)
        canvases = await asyncio.to_thread(_completed, service, asked)
        seed = new_seed() if asked.seed is None else asked.seed
        answer = _Completing(service, asked, canvases)
        ticket = _rows(service, asked, canvases, seed, asked.logprobs or 0, answer.enough)
        if asked.stream:
            return _streamed(answer.told(ticket))
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
        check("prompt_tokens", len(ids), service.limits.prompt_tokens)
        ticket = service.ticket([scoring(service.model, ids, draws, asked.seed)], asked.timeout)
        (found,) = await _unless_gone(request, ticket)
        return _scored(service, asked.text, ids, found)


def _add_pages(app: FastAPI) -> None:
    page = files("unmask.serve") / "page"

    def served(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (page / name).read_bytes()

        async def route() -> Response:
            return Response(content, media_type=kind)

        return route

    for path, name, kind in (
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/page.css", "page.css", "text/css; charset=utf-8"),
        ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ):
        app.add_api_route(path, served(name, kind), include_in_schema=False)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference(app.openapi()))


def _completed(service: Service, asked: CompletionRequest) -> list[Canvas]:
    """A canvas for each prompt."""
    wording, known = service.wording, service.wording.tokenizer.size
    tokens = within("max_tokens", asked.max_tokens, 16, service.limits.max_tokens)
    canvases = []
    for prompt in _prompts(asked):
        ids = wording.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for id_ in ids:
            if id_ >= known or id_ == wording.mask:
                raise ValueError(f"the prompt's token {id_} is not one of the tokenizer's 0..{known - 1}")
        canvases.append(wording.between(ids, tokens, asked.suffix or ""))
    return canvases


def _prompts(asked: CompletionRequest) -> list[str | list[int]]:
    """One text, several texts, one list of ids, or several."""
    if isinstance(asked.prompt, str):
        return [asked.prompt]
    if not asked.prompt:
        raise ValueError("the list of prompts is empty")
    texts = [each for each in asked.prompt if isinstance(each, str | list)]
    return texts or [[each for each in asked.prompt if isinstance(each, int)]]


def _rows(
    service: Service,
    asked: Writing,
    canvases: Sequence[Canvas],
    seed: int,
    alternatives: int,
    enough: Callable[[Canvas, Sequence[int]], bool] | None = None,
) -> Ticket:
    """Send `n` rows for each canvas on their way."""
    sampler = service.sampler(asked)
    check("n", asked.n * len(canvases), service.limits.n)
    works = []
    for canvas in canvases:
        service.check_canvas(canvas)
        stop = (lambda ids, canvas=canvas: enough(canvas, ids)) if enough and not revises(sampler) else None
        for row in range(asked.n):
            more = {} if stop is None else {"enough": stop}
            works.append(writing(service.model, canvas.ids, sampler, seed + row, alternatives, **more))
    return service.ticket(works, asked.timeout, watched=asked.stream)


class _Infilling:
    """The answer to a request for infilling."""

    def __init__(self, service: Service, canvas: Canvas, seed: int, n: int) -> None:
        self.service, self.canvas, self.seed, self.n = service, canvas, seed, n
        self.wording, self.id, self.created = service.wording, new_id("infill"), int(time.time())

    def filled(self, row: Row, index: int) -> Filled:
        self.service.metrics.tokens.inc(self.canvas.hidden)
        return self.wording.filled(row, self.canvas, index, self.seed + index)

    def whole(self, results: Sequence[Filled]) -> InfillAnswer:
        return InfillAnswer(
            id=self.id,
            created=self.created,
            model=self.service.name,
            results=list(results),
            usage=_usage(self.canvas.given, self.n * self.canvas.hidden),
        )

    async def told(self, ticket: Ticket) -> AsyncIterator[bytes]:
        mask, ids = self.wording.mask, self.canvas.ids
        pieces = self.wording.pieces([id_ for id_ in ids if id_ != mask])
        given = iter(pieces)
        shown = [None if id_ == mask else {"id": id_, "text": next(given)} for id_ in ids]
        start = {"id": self.id, "model": self.service.name, "seed": self.seed, "n": self.n, "tokens": shown}
        yield _event("canvas", start)
        results: list[Filled | None] = [None] * self.n
        async for index, event in ticket.events():
            if isinstance(event, Step):
                changes = [self._change(mark) for mark in event.marks]
                draft = self.wording.draft(event.ids)
                told = {"index": index, "step": event.number, "draft": draft, "changes": changes}
                yield _event("step", told)
            elif isinstance(event, Ended):
                filled = results[index] = self.filled(event.result, index)
                yield _event("result", filled)
        yield _event("answer", self.whole([result for result in results if result is not None]))

    def _change(self, mark: Mark) -> dict[str, Any]:
        return {
            "position": mark.position,
            "id": mark.id,
            "text": None if mark.id is None else self.wording.token(mark.id),
            "logprob": mark.logprob,
            "alternatives": [each.model_dump() for each in self.wording.alternatives(mark)],
        }


class _Completing:
    """The answer to a request for completions: row i completes canvas i // n."""

    def __init__(self, service: Service, asked: CompletionRequest, canvases: Sequence[Canvas]) -> None:
        self.service, self.asked, self.canvases, self.wording = service, asked, canvases, service.wording
        self.id, self.created = new_id("cmpl"), int(time.time())
        self.stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []

    def enough(self, canvas: Canvas, ids: Sequence[int]) -> bool:
        """Whether what follows would be cut off anyway."""
        return bool(self.stops) and cut(self.wording.beginning(_hole(canvas, ids)), self.stops) is not None

    def choice(self, row: Row, index: int) -> CompletionChoice:
        canvas = self.canvases[index // self.asked.n]
        inside = self.wording.beginning(_hole(canvas, row.ids))
        self.service.metrics.tokens.inc(canvas.hidden)
        ended = cut(inside, self.stops)
        text = inside if ended is None else ended
        (first, length), logprobs = canvas.holes[0], None
        if self.asked.logprobs is not None:
            places = [place for place in range(first, first + length) if row.ids[place] != self.wording.mask]
            logprobs = self.wording.logprobs(row, places)
        return CompletionChoice(
            index=index,
            text=self._echo(canvas) + text,
            logprobs=logprobs,
            finish_reason="length" if ended is None else "stop",
        )

    def whole(self, rows: Sequence[Row]) -> CompletionAnswer:
        choices = [self.choice(row, index) for index, row in enumerate(rows)]
        return CompletionAnswer(
            id=self.id, created=self.created, model=self.service.name, choices=choices, usage=self._used()
        )

    async def told(self, ticket: Ticket) -> AsyncIterator[bytes]:
        rows = len(self.canvases) * self.asked.n
        sent = [""] * rows
        settled = not revises(self.service.sampler(self.asked))
        async for index, event in ticket.events():
            canvas = self.canvases[index // self.asked.n]
            if isinstance(event, Step):
                text = self.wording.beginning(_hole(canvas, event.ids)) if settled else ""
                text = text[: sure_length(text, self.stops)] if cut(text, self.stops) is None else sent[index]
                whole = self._echo(canvas) + text if text else sent[index]
                yield self._chunk(index, whole[len(sent[index]) :], None, self.wording.draft(event.ids))
                sent[index] = whole
            elif isinstance(event, Ended):
                choice = self.choice(event.result, index)
                rest = choice.text[len(sent[index]) :]
                yield self._chunk(index, rest, choice.finish_reason, self.wording.draft(event.result.ids))
        if (self.asked.stream_options or {}).get("include_usage"):
            last = CompletionAnswer(
                id=self.id, created=self.created, model=self.service.name, choices=[], usage=self._used()
            )
            yield f"data: {last.model_dump_json()}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, reason: str | None, draft: str) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "draft": draft}
        chunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _echo(self, canvas: Canvas) -> str:
        return self.wording.tokenizer.decode(canvas.ids[: canvas.holes[0][0]]) if self.asked.echo else ""

    def _used(self) -> Usage:
        written = self.asked.n * sum(canvas.hidden for canvas in self.canvases)
        return _usage(sum(canvas.given for canvas in self.canvases), written)


def _hole(canvas: Canvas, ids: Sequence[int]) -> Sequence[int]:
    ((first, length),) = canvas.holes
    return ids[first : first + length]


def _usage(given: int, written: int) -> Usage:
    return Usage(prompt_tokens=given, completion_tokens=written, total_tokens=given + written)


def _scored(service: Service, text: str, ids: Sequence[int], found: Score) -> ScoreAnswer:
    figures: dict[str, Any] = Score(found.nats, found.variance, found.tokens, TextSize.of(text)).figures()
    told = {name: figures[name] for name in ScoreAnswer.model_fields if name in figures and name != "tokens"}
    pieces = zip(ids, service.wording.pieces(ids), found.token_nats, strict=True)
    return ScoreAnswer(
        model=service.name,
        exact=isinstance(service.model.denoise.process, LeftToRight),
        nats=found.nats,
        tokens=[ScoredToken(id=id_, text=piece, nats=nats) for id_, piece, nats in pieces],
        by_time=[
            TimeShare(start=cell / CELLS, end=(cell + 1) / CELLS, nats_per_token=nats, standard_error=error)
            for cell, (nats, error) in enumerate(zip(found.by_time, found.by_time_error, strict=True))
        ],
        **{name: value for name, value in told.items() if name != "by_time"},
    )


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
            async for event in events:
                yield event
        except tuple(STATUS) as error:  # the status line has long been sent
            yield _event("error", _answer(error)[1])

    return StreamingResponse(safely(), media_type="text/event-stream")


def _event(name: str, data: BaseModel | dict[str, Any]) -> bytes:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()


async def _problem(_: Request, error: Exception) -> Response:
    status, answer, headers = *_answer(error), {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "2"
    elif isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return JSONResponse(answer.model_dump(), status, headers)


def _answer(error: Exception) -> tuple[int, ErrorAnswer]:
    if isinstance(error, RequestValidationError):
        param, sentence = _first_fault(error)
        return 422, ErrorAnswer(error=Problem(message=sentence, type="invalid_request_error", param=param))
    if isinstance(error, HTTPException):
        return error.status_code, ErrorAnswer(
            error=Problem(message=str(error.detail), type="invalid_request_error")
        )
    status, kind = next(found for each, found in STATUS.items() if isinstance(error, each))
    problem = Problem(message=str(error) or type(error).__name__, type=kind)
    if isinstance(error, LimitError):
        problem.param = error.param
    elif isinstance(error, UnknownModelError):
        problem.param, problem.code = "model", "model_not_found"
    return status, ErrorAnswer(error=problem)


def _first_fault(error: RequestValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong, in a sentence; what was sent is not repeated, it may be huge."""
    fault = error.errors()[0]
    place = [str(step) for step in fault["loc"] if step != "body"]
    param = place[0] if place else None
    told = str(fault["msg"]).removeprefix("Value error, ")
    return param, f"{'.'.join(place)}: {told}" if place else told
