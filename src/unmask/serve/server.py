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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from unmask.serve._app import create_app
from unmask.serve._connection import Connection
from unmask.serve._engine import SHUTDOWN_GRACE_SECONDS
from unmask.serve._middleware import LOOPBACK_HOSTS, validate_origin
from unmask.serve.models import Load, ServedModels
from unmask.serve.service import Service

_FINAL_RESPONSE_SECONDS = 2.0
"""Seconds for the last responses, after which connections are closed."""


class GracefulServer(uvicorn.Server):
    """A uvicorn server that closes the engines first, while waiting clients can still get a response.

    Running requests are finished or, after `shutdown_timeout` seconds, answered with an error.
    """

    def __init__(self, app: ASGIApp, models: ServedModels, shutdown_timeout: float, **options: Any) -> None:
        limit = math.ceil(shutdown_timeout + SHUTDOWN_GRACE_SECONDS + _FINAL_RESPONSE_SECONDS)
        options = {"http": Connection, "ws": "none", **options}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=limit, **options))
        self.models, self.shutdown_timeout = models, shutdown_timeout
        self.engines_stopped = True
        """Whether the engines' threads have ended; otherwise the process must exit without them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self.models.close(self.shutdown_timeout))
        await super().shutdown(sockets)
        await self.models.close_structure_compilers()
        self.engines_stopped = await closing


def serve(
    models: ServedModels,
    loads: Sequence[Load],
    host: str,
    port: int,
    token: str | None = None,
    allowed_hosts: Collection[str] = (),
    shutdown_timeout: float = 30.0,
    allowed_origins: Collection[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal arrives; `loads` load the models while the server already answers /health.

    A host that other machines can reach needs a token. SIGTERM ends the server when running requests are
    finished, at the latest after `shutdown_timeout` seconds and a few more for error responses. It also ends if none of
    its models can be loaded.
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

    def on_failure(service: Service, error: Exception) -> None:
        failed.append(error)
        if len(failed) == len(models.services):
            server.should_exit = True
        else:
            log(f"{service.name} could not be loaded: {error}")

    def on_startup() -> None:
        models.start(loads, lambda service: log(f"{service.name} is ready"), on_failure)

    hosts = {*LOOPBACK_HOSTS, host, *allowed_hosts}
    app = create_app(models, on_startup, hosts, token, allowed_origins)
    server = GracefulServer(app, models, shutdown_timeout, log_level="warning", access_log=False, server_header=False)
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again after shutdown; the process shall still exit with 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
    shown = f"[{host}]" if ":" in host else host
    log(f"http://{shown}:{listener.getsockname()[1]}/ (loading {models.title})")
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if not server.engines_stopped:
        # A stuck thread cannot be joined, and would crash in the interpreter's shutdown.
        sys.stderr.flush()
        os._exit(1)
    if len(failed) == len(models.services):
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
