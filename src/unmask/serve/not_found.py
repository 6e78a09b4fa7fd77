"""What is said to who asks for a route that does not exist."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from unmask.config import suggest

_COMPLETION_HINT = "POST /v1/completions continues a prompt (up to a suffix), POST /v1/infill fills any holes"

_OTHER_SERVERS_ROUTES = {
    "chat/completions": f"this is a completion model, which does not chat: {_COMPLETION_HINT}",
    "responses": f"this is a completion model, without responses or tools: {_COMPLETION_HINT}",
    "messages": f"this is a completion model, which does not chat: {_COMPLETION_HINT}",
    "api/chat": f"this is a completion model, which does not chat: {_COMPLETION_HINT}",
    "embeddings": "this is a completion model, which makes no embeddings: POST /v1/score rates a text",
    "api/embeddings": "this is a completion model, which makes no embeddings: POST /v1/score rates a text",
    "rerank": "this is a completion model, which does not rank: POST /v1/score rates a text",
    "api/generate": _COMPLETION_HINT,
    "fim/completions": _COMPLETION_HINT,
    "beta/completions": _COMPLETION_HINT,
    "completion": _COMPLETION_HINT,
}
"""Routes of other servers (without /v1/), and what does here what can be done."""


def not_found_message(request: Request) -> str:
    """What there is, if not what was asked for."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    known = {route.path: " or ".join(sorted(route.methods or ())) for route in routes}
    path = request.url.path if len(request.url.path) <= 80 else f"{request.url.path[:80]}..."
    asked = f"{request.method} {path}"
    if path in known:
        return f"there is no {asked} here; {path} takes {known[path]}"
    for better in (f"/v1{path}", path.replace("/v1/v1/", "/v1/"), path.rstrip("/")):
        if better in known:
            return f"there is no {asked} here; did you mean {known[better]} {better}?"
    name = path.strip("/").removeprefix("v1/")
    if name in _OTHER_SERVERS_ROUTES:
        return f"there is no {asked} here: {_OTHER_SERVERS_ROUTES[name]}"
    listed = ", ".join(f"{methods} {route}" for route, methods in known.items())
    return f"there is no {asked} here{suggest(path, known)}; there are {listed}"
