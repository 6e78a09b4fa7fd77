"""What is refused before anybody looks at it: strange hosts and origins, no token, no JSON, too much of it.

A server on 127.0.0.1 is within reach of every page that its owner's browser shows. So the Host header must be
one that was allowed (else a name that is made to point here could speak to it), and a request that says where
it comes from must come from here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unmask.serve.metrics import Metrics

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application around another."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, hosts: Collection[str], token: str | None, body_bytes: int
    ) -> None:
        self.app, self.metrics, self.token, self.body_bytes = app, metrics, token, body_bytes
        self.hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self._check(scope["method"], scope["path"], headers)
            await self.app(scope, self._limited(receive), answer)
        except HTTPException as refusal:
            await _refuse(refusal, answer)
        finally:
            # Only routes that exist get a line of their own, or strangers could make any number of them.
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.latency.labels(route).observe(time.perf_counter() - began)

    def _check(self, method: str, path: str, headers: dict[str, str]) -> None:
        host = _hostname(headers.get("host", ""))
        if host not in self.hosts:
            raise HTTPException(400, f"this server is not called {host!r}; --allow-host adds a name")
        origin = headers.get("origin")
        elsewhere = origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        if elsewhere or (headers.get("sec-fetch-site") == "cross-site" and method != "GET"):
            raise HTTPException(403, "requests from other sites are not answered")
        if self.token is not None and path != "/health" and not _allowed(headers, self.token):
            raise HTTPException(
                401,
                "this server needs its token: send the header Authorization: Bearer TOKEN",
                {"www-authenticate": 'Basic realm="unmask: any name, the token as password"'},
            )
        if method == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:20]) > self.body_bytes:
                raise self._too_large()

    def _limited(self, receive: Receive) -> Receive:
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"a request has at most {self.body_bytes:,} bytes here", {"connection": "close"}
        )


async def _refuse(refusal: HTTPException, send: Send) -> None:
    problem = {"message": refusal.detail, "type": "invalid_request_error", "param": None, "code": None}
    body = json.dumps({"error": problem}).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(refusal.headers or {}),
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _allowed(headers: dict[str, str], token: str) -> bool:
    """Bearer for programs; Basic, with the token as password, is what a browser asks its user for."""
    kind, _, rest = headers.get("authorization", "").partition(" ")
    given = rest.strip().encode("latin-1")  # as it came
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given, token.encode())
