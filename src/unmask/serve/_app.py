"""The HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from unmask import __version__
from unmask.serve._api_docs import render_api_docs
from unmask.serve._chat_route import add_chat_route
from unmask.serve._classifier import classification_job
from unmask.serve._errors import ERROR_STATUS, error_response
from unmask.serve._generation import (
    STREAM_RESPONSE,
    await_or_cancel,
    check_generation,
    random_seed,
    sse_response,
    submit_generation,
)
from unmask.serve._jobs import scoring_job
from unmask.serve._middleware import SecurityMiddleware
from unmask.serve._response_schemas import (
    ClassifyResponse,
    CompletionResponse,
    ErrorResponse,
    InfillResponse,
    ModelCard,
    ModelList,
    ScoreResponse,
    ServerState,
    Token,
    TokenizeResponse,
)
from unmask.serve._responses import CompletionResponder, InfillResponder, score_response
from unmask.serve._schemas import (
    ClassifyRequest,
    CompletionRequest,
    InfillRequest,
    ScoreRequest,
    TokenizeRequest,
)
from unmask.serve.models import ServedModels

_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
}


def create_app(
    models: ServedModels,
    on_startup: Callable[[], None],
    allowed_hosts: Collection[str],
    token: str | None = None,
    allowed_origins: Collection[str] = (),
) -> SecurityMiddleware:
    """The application; `on_startup` is called when it runs, and starts loading the models."""

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
    _add_server_routes(app, models)
    _add_tokenize_route(app, models)
    if models.classifiers:
        _add_classify_route(app, models)
    if models.language_models:
        _add_generation_routes(app, models)
        add_chat_route(app, models)
        _add_score_route(app, models)
    _add_pages(app, token is not None, has_page=bool(models.language_models))
    _extend_schema(app, models, token is not None)
    return SecurityMiddleware(app, models.metrics, allowed_hosts, token, models.body_bytes, allowed_origins)


def _add_server_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/health", tags=["server"])
    async def health(model: str | None = None) -> ServerState:
        """Whether the server is alive; 503 if all models, or `model`, have ended or are stuck."""
        models.check_alive(model)
        return ServerState(status="alive", models=models.states())

    @app.get("/ready", tags=["server"])
    async def ready(model: str | None = None) -> ServerState:
        """Whether all models, or `model`, are loaded; 503 until then. Models that could not be loaded do not count as
        long as there are others."""
        models.check_ready(model)
        return ServerState(status="ready", models=models.states())

    @app.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(await models.render_metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", tags=["model"], name="models")
    async def list_models() -> ModelList:
        """The models that are loaded, with their samplers and limits."""
        return ModelList(data=models.cards())

    @app.get("/v1/models/{model:path}", tags=["model"])
    async def retrieve_model(model: str) -> ModelCard:
        """A served model by its name."""
        return models.choose(model).model_card()


def _add_generation_routes(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/infill", tags=["model"], response_model=InfillResponse, responses=STREAM_RESPONSE)
    async def infill(body: InfillRequest, request: Request) -> Any:
        """Fill the holes of a template.

        With `stream`, server-sent events: `canvas` once, then `step` after each step of each candidate (the
        draft as a template, and the changed tokens), `result` for each candidate, and `response`, which is
        the response without `stream`.
        """
        service = models.language_model(body.model)
        service.limits.check("alternatives", body.alternatives)
        template = body.template if body.template is not None else body.segments
        assert template is not None
        masked_text = await asyncio.to_thread(service.codec.encode_template, template)
        seed = random_seed() if body.seed is None else body.seed
        handle = await submit_generation(service, body, [masked_text], seed, body.alternatives)
        responder = InfillResponder(service, masked_text, seed, body.n)
        if body.stream:
            return sse_response(responder.stream(handle.events()))
        return responder.response(await await_or_cancel(request, handle))

    @app.post("/v1/completions", tags=["model"], response_model=CompletionResponse, responses=STREAM_RESPONSE)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Generate `max_tokens` tokens after `prompt` and before `suffix`, compatible with OpenAI's clients.

        With `stream`, text is sent as soon as nothing before it can change; every chunk also has the current
        draft, as a template, in `draft`.
        """
        service = models.language_model(body.model)
        responder = await asyncio.to_thread(CompletionResponder, service, body)
        seed = random_seed() if body.seed is None else body.seed
        if body.max_tokens == 0:
            check_generation(service, body, responder.masked_texts)
            if body.stream:
                return sse_response(responder.stream(responder.empty_events()))
            return responder.response(responder.empty_sequences())
        handle = await submit_generation(
            service, body, responder.masked_texts, seed, body.logprobs or 0, responder.hit_stop
        )
        if body.stream:
            return sse_response(responder.stream(handle.events()))
        return responder.response(await await_or_cancel(request, handle))


def _add_tokenize_route(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/tokenize", tags=["model"])
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The tokens of a text, for example to know how long a hole must be."""
        service = models.choose(body.model)
        ids, texts = await asyncio.to_thread(service.codec.tokenize, body.text)
        return TokenizeResponse(tokens=[Token(id=id_, text=text) for id_, text in zip(ids, texts, strict=True)])


def _add_score_route(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/score", tags=["model"])
    async def score(body: ScoreRequest, request: Request) -> ScoreResponse:
        """A bound on the negative log-likelihood of a text in nats, with standard errors, by token and by time."""
        service = models.language_model(body.model)
        draws = service.limits.resolve("draws", body.draws, 128)
        ids = await asyncio.to_thread(service.codec.tokenizer.encode, body.text)
        service.limits.check_prompt("text", len(ids))
        deadline = service.deadline(body.timeout)
        handle = service.submit([scoring_job(service.model, ids, draws, body.seed)], deadline)
        (result,) = await await_or_cancel(request, handle)
        return score_response(service, body.text, ids, result)


def _add_classify_route(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/classify", tags=["model"])
    async def classify(body: ClassifyRequest, request: Request) -> ClassifyResponse:
        """The class of each text with the probabilities of all classes, or its number.

        The texts of all requests share network calls.
        """
        service = models.classifier(body.model)
        service.limits.check("texts", len(body.texts))
        served, deadline = service.classifier, service.deadline(body.timeout)
        jobs = await asyncio.to_thread(
            lambda: [classification_job(served, text, i, body.too_long) for i, text in enumerate(body.texts)]
        )
        handle = service.submit(jobs, deadline)
        return ClassifyResponse(model=service.name, results=await await_or_cancel(request, handle))


def _add_pages(app: FastAPI, requires_token: bool, has_page: bool) -> None:
    page = files("unmask.serve") / "page"
    scripts = sorted(file.name for file in page.iterdir() if file.name.endswith(".js"))

    def static_route(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
        content = (page / name).read_bytes()

        async def route() -> Response:
            return Response(content, media_type=kind)

        return route

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(render_api_docs(app.openapi(), str(request.base_url).rstrip("/"), requires_token))

    if not has_page:  # the page fills holes, which a classifier does not
        app.add_api_route("/", docs, include_in_schema=False)
    for path, name, kind in (
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/page.css", "page.css", "text/css; charset=utf-8"),
        ("/favicon.ico", "icon.svg", "image/svg+xml"),
        *((f"/{name}", name, "text/javascript; charset=utf-8") for name in scripts),
    ):
        app.add_api_route(path, static_route(name, kind), include_in_schema=False)


def _extend_schema(app: FastAPI, models: ServedModels, requires_token: bool) -> None:
    """Add what is known at run time only: the names of the samplers, and whether a token is needed."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generated()
        samplers = list(dict.fromkeys(name for one in models.language_models for name in one.sampler_names()))
        for name in ("InfillRequest", "CompletionRequest", "ChatRequest") if models.language_models else ():
            schema["components"]["schemas"][name]["properties"]["sampler"]["enum"] = samplers
        if requires_token:
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The server's --token."},
                "password": {"type": "http", "scheme": "basic", "description": "The same as a password."},
            }
            schema["security"] = [{"token": []}, {"password": []}]
            schema["paths"]["/health"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
