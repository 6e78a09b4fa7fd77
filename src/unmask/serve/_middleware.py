"""Checks before a request reaches the application: host, origin, token, content type and size.

A server on 127.0.0.1 can be reached by every web page in its user's browser. So the Host header must be an
allowed name (against DNS rebinding), and the Origin header, if there is one, must be the server itself or an
allowed origin, which also gets CORS headers.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unmask.serve._metrics import RequestMetrics
from unmask.serve._response_schemas import ErrorResponse

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_SECURITY_HEADERS = {
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
_OPEN_PATHS = ("/health", "/v1/health")
"""What needs no token."""
_CORS_PREFLIGHT_HEADERS = {
    "access-control-allow-methods": "GET, HEAD, POST",
    "access-control-allow-headers": "*, Authorization, Content-Type",
    "access-control-max-age": "600",
}
"""The response to a CORS preflight request."""


class SecurityMiddleware:
    """ASGI middleware that refuses unsafe requests, adds security headers and counts requests."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: RequestMetrics,
        allowed_hosts: Collection[str],
        token: str | None,
        max_body_bytes: int,
        allowed_origins: Collection[str] = (),
    ) -> None:
        self.app, self.metrics, self.token, self.max_body_bytes = app, metrics, token, max_body_bytes
        self.allowed_hosts = {host.lower() for host in allowed_hosts}
        self.allowed_origins = {validate_origin(origin) for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        extra_headers = {**_SECURITY_HEADERS, **self._cors_headers(headers)}
        # HEAD is handled as GET; uvicorn drops the body.
        inner_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode("latin-1")) for name, value in extra_headers.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self._check_host_and_origin(scope["method"], headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await send_with_headers(
                    {
                        "type": "http.response.start",
                        "status": 204,
                        "headers": _encode_headers(_CORS_PREFLIGHT_HEADERS),
                    }
                )
                await send_with_headers({"type": "http.response.body"})
                return
            self._check_token_and_body(inner_scope["method"], inner_scope["path"], headers)
            await self.app(inner_scope, self._limit_body(receive), send_with_headers)
        except HTTPException as error:
            await _send_error(error, inner_scope["path"], send_with_headers)
        finally:
            # Unknown paths share one label: clients must not be able to create any number of labels.
            route = getattr(inner_scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.latency.labels(route).observe(time.perf_counter() - start)

    def _cors_headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Headers with which a page of an allowed origin may read the response."""
        if not self.allowed_origins:
            return {}
        origin = headers.get("origin", "")
        if not self._is_allowed_origin(origin):
            return {"vary": "Origin"}
        shared = {
            "vary": "Origin",
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "Retry-After",
            "cross-origin-resource-policy": "cross-origin",
        }
        if "access-control-request-private-network" in headers:
            shared["access-control-allow-private-network"] = "true"
        return shared

    def _is_allowed_origin(self, origin: str) -> bool:
        return bool(origin) and ("*" in self.allowed_origins or origin.lower() in self.allowed_origins)

    def _check_host_and_origin(self, method: str, headers: dict[str, str]) -> None:
        """Refuse hosts and origins that are not allowed."""
        host = _hostname(headers.get("host", ""))
        if host not in self.allowed_hosts:
            raise HTTPException(400, f"the host {host!r} is not allowed; --allow-host adds a name")
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy may believe the other header, and take the body for a request.
            raise HTTPException(
                400,
                "a request must have either Content-Length or Transfer-Encoding, not both",
                {"connection": "close"},
            )
        origin = headers.get("origin")
        if origin is not None and self._is_allowed_origin(origin):
            return
        cross_origin = origin is not None and _netloc(origin) != headers.get("host", "").lower()
        if cross_origin or (headers.get("sec-fetch-site") == "cross-site" and method not in ("GET", "HEAD")):
            raise HTTPException(403, "requests from other sites are not allowed; --allow-origin adds a site")

    def _check_token_and_body(self, method: str, path: str, headers: dict[str, str]) -> None:
        if self.token is not None and path not in _OPEN_PATHS and not _is_authorized(headers, self.token):
            raise HTTPException(
                401,
                "this server needs a token: send the header Authorization: Bearer TOKEN",
                {"www-authenticate": 'Basic realm="unmask: any name, the token as password"'},
            )
        if method == "POST":
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            if kind != "application/json":
                raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:20]) > self.max_body_bytes:
                raise self._too_large()

    def _limit_body(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise self._too_large()
            return message

        return limited

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"a request may have at most {self.max_body_bytes:,} bytes", {"connection": "close"})


async def _send_error(error: HTTPException, path: str, send: Send) -> None:
    body = ErrorResponse.make(error.detail).for_path(path).model_dump_json().encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(error.headers or {}),
    }
    await send({"type": "http.response.start", "status": error.status_code, "headers": _encode_headers(headers)})
    await send({"type": "http.response.body", "body": body})


def _encode_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def validate_origin(origin: str) -> str:
    """An origin as browsers send it, or * for all; ValueError otherwise."""
    scheme, _, netloc = origin.lower().rstrip("/").partition("://")
    if origin != "*" and (not scheme.isalnum() or not netloc or _netloc(f"{scheme}://{netloc}") != netloc):
        raise ValueError(
            f"{origin!r} is not an origin: write scheme, host and port only, as in https://my.site:3000, or * for all"
        )
    return origin if origin == "*" else f"{scheme}://{netloc}"


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None if it is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _hostname(host: str) -> str:
    """The host name of a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_authorized(headers: dict[str, str], token: str) -> bool:
    """Whether the token is in the Bearer scheme (programs), or the Basic scheme as password (browsers)."""
    kind, _, rest = headers.get("authorization", "").partition(" ")
    given = rest.strip().encode("latin-1")  # the bytes of the header
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif kind.lower() != "bearer":
        return False
    return hmac.compare_digest(given, token.encode())
