"""What goes wrong, as it is answered: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from unmask.serve.elsewhere import no_route
from unmask.serve.engine import BusyError, ClosedError, InternalError, LateError
from unmask.serve.faults import UNREADABLE, first_fault
from unmask.serve.limits import LimitError
from unmask.serve.schemas import ErrorAnswer, Problem
from unmask.serve.service import NotReadyError, UnknownModelError
from unmask.types import DamagedError

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
    InternalError: (500, "server_error"),
}
"""What each exception is answered with; the first that fits counts."""


async def problem(request: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    status, answer, headers = *told(error), {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "2"
    elif isinstance(error, HTTPException):
        headers.update(error.headers or {})
        if status in (404, 405):
            answer.error.message = no_route(request)
            answer.error.code = "unknown_url" if status == 404 else None
    return JSONResponse(answer.model_dump(), status, headers)


def told(error: Exception) -> tuple[int, ErrorAnswer]:
    """The status and the sentence."""
    if isinstance(error, RequestValidationError):
        status, param, sentence = first_fault(error)
        return status, ErrorAnswer(error=Problem(message=sentence, type="invalid_request_error", param=param))
    if isinstance(error, HTTPException):
        sentence = UNREADABLE if error.detail == "There was an error parsing the body" else str(error.detail)
        return error.status_code, ErrorAnswer(error=Problem(message=sentence, type="invalid_request_error"))
    status, kind = next(found for each, found in STATUS.items() if isinstance(error, each))
    problem = Problem(message=str(error) or type(error).__name__, type=kind)
    if isinstance(error, LimitError):
        problem.param, problem.code = error.param, error.code
    elif isinstance(error, UnknownModelError):
        problem.param, problem.code = "model", "model_not_found"
    return status, ErrorAnswer(error=problem)
