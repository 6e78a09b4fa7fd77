"""What goes wrong, as it is answered: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from unmask.serve.engine import DeadlineError, EngineClosedError, InternalError, QueueFullError
from unmask.serve.limits import LimitError
from unmask.serve.not_found import not_found_message
from unmask.serve.schemas import ErrorBody, ErrorResponse
from unmask.serve.service import NotReadyError, UnknownModelError
from unmask.serve.validation import UNREADABLE_BODY, describe_validation_error
from unmask.types import NonFiniteError

ERROR_STATUS: dict[type[Exception], tuple[int, str]] = {
    LimitError: (400, "invalid_request_error"),
    UnknownModelError: (404, "invalid_request_error"),
    NonFiniteError: (500, "server_error"),
    ValueError: (400, "invalid_request_error"),
    QueueFullError: (429, "rate_limit_error"),
    NotReadyError: (503, "server_error"),
    EngineClosedError: (503, "server_error"),
    DeadlineError: (504, "timeout"),
    MemoryError: (503, "server_error"),
    InternalError: (500, "server_error"),
}
"""What each exception is answered with; the first that fits counts."""


async def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    status, answer, headers = *to_error(error), {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "2"
    elif isinstance(error, HTTPException):
        headers.update(error.headers or {})
        if status in (404, 405):
            answer.error.message = not_found_message(request)
            answer.error.code = "unknown_url" if status == 404 else None
    return JSONResponse(answer.model_dump(), status, headers)


def to_error(error: Exception) -> tuple[int, ErrorResponse]:
    """The status and the sentence."""
    if isinstance(error, RequestValidationError):
        status, param, sentence = describe_validation_error(error)
        return status, ErrorResponse(error=ErrorBody(message=sentence, type="invalid_request_error", param=param))
    if isinstance(error, HTTPException):
        sentence = UNREADABLE_BODY if error.detail == "There was an error parsing the body" else str(error.detail)
        return error.status_code, ErrorResponse(error=ErrorBody(message=sentence, type="invalid_request_error"))
    status, kind = next(found for each, found in ERROR_STATUS.items() if isinstance(error, each))
    problem = ErrorBody(message=str(error) or type(error).__name__, type=kind)
    if isinstance(error, LimitError):
        problem.param, problem.code = error.param, error.code
    elif isinstance(error, UnknownModelError):
        problem.param, problem.code = "model", "model_not_found"
    return status, ErrorResponse(error=problem)
