"""Start the server, and shut it down in time."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from unmask.classification import Classifier
from unmask.model import LanguageModel
from unmask.serve._app import create_app
from unmask.serve._connection import Connection
from unmask.serve._engine import SHUTDOWN_GRACE_SECONDS
from unmask.serve._middleware import LOOPBACK_HOSTS, validate_origin
from unmask.serve.service import Service

_FINAL_RESPONSE_SECONDS = 2.0
"""Seconds for the last responses, after which connections are closed."""


class GracefulServer(uvicorn.Server):
    """A uvicorn server that closes the service first, while waiting clients can still get a response.

    Running requests are finished or, after `shutdown_timeout` seconds, answered with an error.
    """

    def __init__(self, app: ASGIApp, service: Service, shutdown_timeout: float, **options: Any) -> None:
        limit = math.ceil(shutdown_timeout + SHUTDOWN_GRACE_SECONDS + _FINAL_RESPONSE_SECONDS)
        options = {"http": Connection, "ws": "none", **options}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=limit, **options))
        self.service, self.shutdown_timeout = service, shutdown_timeout
        self.engine_stopped = True
        """Whether the engine's thread has ended; otherwise the process must exit without it."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self.service.close, self.shutdown_timeout))
        await super().shutdown(sockets)
        await self.service.close_structure_compiler()
        self.engine_stopped = await closing


def serve(
    service: Service,
    load: Callable[[], LanguageModel | Classifier],
    host: str,
    port: int,
    token: str | None = None,
    allowed_hosts: Collection[str] = (),
    shutdown_timeout: float = 30.0,
    allowed_origins: Collection[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal arrives; `load` loads the model while the server already answers /health.

    A host that other machines can reach needs a token. SIGTERM ends the server when running requests are
    finished, at the latest after `shutdown_timeout` seconds and a few more for error responses.
    """
    if not _is_loopback(host) and not token:
        raise ValueError(
            f"{host} can be reached from other machines, so it needs a token: --token SECRET, or the variable"
            " UNMASK_TOKEN"
        )
    for origin in allowed_origins:
        validate_origin(origin)
    listener = _bind_socket(host, port)
    failed: list[Exception] = []

    def on_failure(error: Exception) -> None:
        failed.append(error)
        server.should_exit = True

    def on_startup() -> None:
        service.start(load, lambda: log(f"{service.name} is ready"), on_failure)

    hosts = {*LOOPBACK_HOSTS, host, *allowed_hosts}
    app = create_app(service, on_startup, hosts, token, allowed_origins)
    server = GracefulServer(app, service, shutdown_timeout, log_level="warning", access_log=False, server_header=False)
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again after shutdown; the process shall still exit with 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
    shown = f"[{host}]" if ":" in host else host
    log(f"http://{shown}:{listener.getsockname()[1]}/ (loading {service.name})")
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if not server.engine_stopped:
        # A stuck thread cannot be joined, and would crash in the interpreter's shutdown.
        sys.stderr.flush()
        os._exit(1)
    if failed:
        raise failed[0]


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError if the address cannot be bound."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, OverflowError):
        raise ValueError(f"{host}:{port} is not an address that a server can listen at") from None
    # With the protocol given, asyncio turns off Nagle's algorithm, which delays responses by 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use by another program; choose another --port") from None
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listening
