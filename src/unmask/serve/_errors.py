"""Errors as responses: a status and one sentence, in the JSON that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from unmask.config import suggest
from unmask.serve._engine import DeadlineError, EngineClosedError, InternalError, QueueFullError
from unmask.serve._response_schemas import ErrorResponse
from unmask.serve.limits import FieldError
from unmask.serve.service import NotReadyError, SlowReaderError, UnknownModelError
from unmask.types import NonFiniteError

ERROR_STATUS: dict[type[Exception], tuple[int, str]] = {
    FieldError: (400, "invalid_request_error"),
    UnknownModelError: (404, "invalid_request_error"),
    NonFiniteError: (500, "server_error"),
    ValueError: (400, "invalid_request_error"),
    QueueFullError: (429, "rate_limit_error"),
    NotReadyError: (503, "server_error"),
    EngineClosedError: (503, "server_error"),
    DeadlineError: (504, "timeout"),
    SlowReaderError: (408, "timeout"),
    MemoryError: (503, "server_error"),
    InternalError: (500, "server_error"),
}
"""The status and type of each exception; the first match counts."""


async def error_response(request: Request, error: Exception) -> Response:
    """The response to a request that failed."""
    status, body = to_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "2"
    elif isinstance(error, HTTPException):
        headers.update(error.headers or {})
        if status in (404, 405):
            body.error.message = _not_found_message(request)
            body.error.code = "unknown_url" if status == 404 else None
    return JSONResponse(body.for_path(request.url.path).model_dump(), status, headers)


def to_error(error: Exception) -> tuple[int, ErrorResponse]:
    """The status and body of an error response."""
    if isinstance(error, RequestValidationError):
        status, param, message = _describe_validation_error(error)
        return status, ErrorResponse.make(message, param=param)
    if isinstance(error, HTTPException):
        unreadable = error.detail == "There was an error parsing the body"
        return error.status_code, ErrorResponse.make(_UNREADABLE_BODY if unreadable else str(error.detail))
    status, type_ = next(result for cls, result in ERROR_STATUS.items() if isinstance(error, cls))
    param, code = None, None
    if isinstance(error, FieldError):
        param, code = error.param, error.code
    elif isinstance(error, UnknownModelError):
        param, code = "model", "model_not_found"
    return status, ErrorResponse.make(str(error) or type(error).__name__, type_, param, code)


_UNREADABLE_BODY = "the body cannot be parsed as JSON: it must be UTF-8, and not nested deeply"

_EXPECTED_BY_ERROR_TYPE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a number of fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_unicode": "a text of whole characters",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
}
"""What a field must be, by the type of pydantic's error."""


def _describe_validation_error(error: RequestValidationError) -> tuple[int, str | None, str]:
    """Status, field and sentence of the first error; the value is not repeated, since it may be huge."""
    all_errors = error.errors()
    first, body = all_errors[0], error.body
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        return 400, None, _json_syntax_error(str(body), int(first["loc"][-1]), str(context.get("error", "")))
    if first["type"] == "refused":
        return 422, context["param"], context["sentence"]
    keys = _field_path(first["loc"], body)
    # Of a field of a union type, the member that fits best is meant: the one whose error lies deepest.
    paths = [found for each in all_errors if (found := _field_path(each["loc"], body))[:1] == keys[:1]]
    keys = max(paths, key=len)
    if not keys:
        return 422, None, "the body must be a JSON object, with the fields that /docs lists"
    path = keys[0] + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys[1:])
    # A field of a union type has an error for each member.
    same_field = [each for each in all_errors if _field_path(each["loc"], body) == keys]
    if same_field[0]["type"] == "missing":
        missing = same_field[0]["loc"][-1]
        path = path if keys[-1] == missing else f"{path}.{missing}"
        return 422, path, f"the field {path} is missing"
    expected = list(dict.fromkeys(_expected(each) for each in same_field))
    options = " or ".join([", ".join(expected[:-1]), expected[-1]] if len(expected) > 1 else expected)
    return 422, path, f"the field {path} must be {options}"


def _expected(error: dict[str, Any]) -> str:
    template = _EXPECTED_BY_ERROR_TYPE.get(error["type"])
    if template is None:
        return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return template.format(**error.get("ctx", {}))


def _field_path(loc: tuple[Any, ...], body: Any) -> list[Any]:
    """The keys that lead to the error in the body, without pydantic's names of union members."""
    keys: list[Any] = []
    for key in loc[1:]:
        if isinstance(body, dict) and isinstance(key, str) and (key in body or not keys):
            keys.append(key)
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and key < len(body):
            keys.append(key)
            body = body[key]
    return keys


def _json_syntax_error(body: str, position: int, reason: str) -> str:
    before = body[:position]
    line, column = before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
    detail = f"{reason[:1].lower()}{reason[1:]} " if reason else ""
    return f"the body is not JSON: {detail}at line {line}, column {column}"


_COMPLETION_HINT = "POST /v1/completions continues a prompt (up to a suffix), POST /v1/infill fills any holes"

_CHAT_HINT = f"POST /v1/chat/completions answers conversations, {_COMPLETION_HINT}"

_OTHER_SERVERS_ROUTES = {
    "responses": _CHAT_HINT,
    "messages": _CHAT_HINT,
    "api/embeddings": "POST /api/embed and POST /v1/embeddings make them",
    "embedding": "POST /v1/embeddings makes embeddings",
    "rerank": "this is a completion model, which does not rank: POST /v1/score rates a text",
    "classify": "this server has a language model: `unmask serve` a classifier's folder to classify texts",
    "beta/completions": _COMPLETION_HINT,
}
"""Routes of other servers (without /v1/), and which route does something similar here."""


def _not_found_message(request: Request) -> str:
    """A sentence for an unknown route or method, with the closest one that exists."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    known = {route.path: " or ".join(sorted(route.methods or ())) for route in routes}
    path = request.url.path if len(request.url.path) <= 80 else f"{request.url.path[:80]}..."
    route_name = f"{request.method} {path}"
    if path in known:
        return f"there is no {route_name} here; {path} takes {known[path]}"
    for better in (f"/v1{path}", path.replace("/v1/v1/", "/v1/"), path.rstrip("/")):
        if better in known:
            return f"there is no {route_name} here; did you mean {known[better]} {better}?"
    name = path.strip("/").removeprefix("v1/")
    if name in _OTHER_SERVERS_ROUTES:
        return f"there is no {route_name} here: {_OTHER_SERVERS_ROUTES[name]}"
    listed = ", ".join(f"{methods} {route}" for route, methods in known.items())
    return f"there is no {route_name} here{suggest(path, known)}; there are {listed}"
