"""What is wrong with the shape of a request, in the words of the client's JSON."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError

UNREADABLE_BODY = "the body is not JSON that can be read: it must be UTF-8, and not nested deeply"

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
"""What would have been right, by the kind of the fault."""


def describe_validation_error(error: RequestValidationError) -> tuple[int, str | None, str]:
    """Status, field and sentence of what is wrong first; what was sent is not repeated, it may be huge."""
    faults = error.errors()
    fault, body = faults[0], error.body
    context = fault.get("ctx", {})
    if fault["type"] == "json_invalid":
        return 400, None, _json_syntax_error(str(body), int(fault["loc"][-1]), str(context.get("error", "")))
    if fault["type"] == "refused":
        return 422, context["param"], context["sentence"]
    place = _field_path(fault["loc"], body)
    if not place:
        return 422, None, "the body must be a JSON object, with the fields that /docs lists"
    path = place[0] + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place[1:])
    if fault["type"] == "missing":
        return 422, path, f"the field {path} is missing"
    # A field that may be one of several things has a fault for each.
    same = [each for each in faults if _field_path(each["loc"], body) == place]
    wanted = list(dict.fromkeys(_expected(each) for each in same))
    several = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if len(wanted) > 1 else wanted)
    return 422, path, f"the field {path} must be {several}"


def _expected(error: dict[str, Any]) -> str:
    told = _EXPECTED_BY_ERROR_TYPE.get(error["type"])
    if told is None:
        return str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return told.format(**error.get("ctx", {}))


def _field_path(loc: tuple[Any, ...], body: Any) -> list[Any]:
    """The steps that lead to a fault in what was sent, without the names of types between them."""
    steps: list[Any] = []
    for step in loc[1:]:
        if isinstance(body, dict) and isinstance(step, str) and (step in body or not steps):
            steps.append(step)
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            steps.append(step)
            body = body[step]
    return steps


def _json_syntax_error(body: str, position: int, reason: str) -> str:
    before = body[:position]
    line, column = before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1
    said = f"{reason[:1].lower()}{reason[1:]} " if reason else ""
    return f"the body is not JSON: {said}at line {line}, column {column}"
