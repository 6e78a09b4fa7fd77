"""The HTTP API."""

from __future__ import annotations

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
from unmask.serve._classify_route import add_classify_route
from unmask.serve._completion_route import add_completion_route
from unmask.serve._embeddings import add_embeddings_route
from unmask.serve._errors import ERROR_STATUS, error_response
from unmask.serve._fim_route import add_fim_route
from unmask.serve._infill_route import add_infill_route
from unmask.serve._llama_cpp_routes import add_llama_cpp_routes
from unmask.serve._middleware import SecurityMiddleware
from unmask.serve._ollama_routes import add_ollama_routes
from unmask.serve._response_schemas import ERROR_STATUSES, ErrorResponse, ModelCard, ModelList, ServerState
from unmask.serve._score_route import add_score_route
from unmask.serve._token_routes import add_token_routes
from unmask.serve.models import ServedModels

_MODEL_ROUTES = (
    add_infill_route,
    add_completion_route,
    add_chat_route,
    add_score_route,
    add_embeddings_route,
    add_fim_route,
    add_llama_cpp_routes,
    add_ollama_routes,
)
"""Those of a language model."""

_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": ErrorResponse} for status in ERROR_STATUSES}


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
    add_token_routes(app, models)
    if models.classifiers:
        add_classify_route(app, models)
    for add_route in _MODEL_ROUTES if models.language_models else ():
        add_route(app, models)
    _add_pages(app, token is not None, has_page=bool(models.language_models))
    _extend_schema(app, models, token is not None)
    return SecurityMiddleware(app, models.metrics, allowed_hosts, token, models.body_bytes, allowed_origins)


def _add_server_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/health", include_in_schema=False)
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
        for model in schema["components"]["schemas"].values():
            if "sampler" in model.get("properties", {}):
                model["properties"]["sampler"]["enum"] = samplers
        if requires_token:
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer", "description": "The server's --token."},
                "password": {"type": "http", "scheme": "basic", "description": "The same as a password."},
            }
            schema["security"] = [{"token": []}, {"password": []}]
            schema["paths"]["/health"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
