"""What goes wrong, as it is answered: a status and one sentence, in the shape that OpenAI's clients read."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from unmask.serve.engine import BusyError, ClosedError, InternalError, LateError
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


async def problem(_: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    status, answer, headers = *told(error), {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(error.retry_after)
    elif isinstance(error, NotReadyError):
        headers["Retry-After"] = "2"
    elif isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return JSONResponse(answer.model_dump(), status, headers)


def told(error: Exception) -> tuple[int, ErrorAnswer]:
    """The status and the sentence."""
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
