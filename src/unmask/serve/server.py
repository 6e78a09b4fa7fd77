"""Start the server, and shut it down in time."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from unmask.serve._app import create_app
from unmask.serve._connection import Connection
from unmask.serve._engine import SHUTDOWN_GRACE_SECONDS
from unmask.serve._listening import bind_socket, check_token, shown_url
from unmask.serve._middleware import LOOPBACK_HOSTS, validate_origin
from unmask.serve._worker import Worker
from unmask.serve.models import Load, ServedModels
from unmask.serve.service import Service
from unmask.serve.workers import WorkerSeat

_FINAL_RESPONSE_SECONDS = 2.0
"""Seconds for the last responses, after which connections are closed."""


class GracefulServer(uvicorn.Server):
    """A uvicorn server that closes the engines first, while waiting clients can still get a response.

    Running requests are finished or, after `shutdown_timeout` seconds, answered with an error.
    """

    def __init__(
        self, app: ASGIApp, models: ServedModels, shutdown_timeout: float, worker: Worker | None = None, **options: Any
    ) -> None:
        limit = math.ceil(shutdown_timeout + SHUTDOWN_GRACE_SECONDS + _FINAL_RESPONSE_SECONDS)
        options = {"http": Connection, "ws": "none", **options}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=limit, **options))
        self.models, self.shutdown_timeout = models, shutdown_timeout
        self.engines_stopped = True
        """Whether the engines' threads have ended; otherwise the process must exit without them."""
        self._worker = worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._worker is not None:
            await self._worker.start(
                self._make_connection, self._on_orphaned, self.models.render_own_metrics, self._is_alive
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._worker is not None:
            await self._worker.stop()
        closing_engines = asyncio.create_task(self.models.close(self.shutdown_timeout))
        await super().shutdown(sockets)
        await self.models.close_structure_compilers()
        self.engines_stopped = await closing_engines

    def _make_connection(self) -> Connection:
        """As uvicorn makes them for a listening socket."""
        assert self._worker is not None
        connection = Connection(self.config, self.server_state, self.lifespan.state)
        connection.on_lost = self._worker.connection_closed
        return connection

    def _is_alive(self) -> bool:
        return not {"stuck", "stopped", "failed"} >= set(self.models.states().values())

    def _on_orphaned(self) -> None:
        self.should_exit = True


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
    seat: WorkerSeat | None = None,
) -> None:
    """Serve until a signal arrives; `loads` load the models while the server already answers /health.

    A host that other machines can reach needs a token. SIGTERM ends the server when running requests are
    finished, at the latest after `shutdown_timeout` seconds and a few more for error responses. It also ends if none of
    its models can be loaded. With a `seat`, connections come from a supervisor, and not from the port.
    """
    check_token(host, token)
    for origin in allowed_origins:
        validate_origin(origin)
    worker = None if seat is None else Worker(seat)
    listener = bind_socket(host, port) if seat is None else None
    loading = _Loading(models, log, on_loaded=(lambda: None) if worker is None else worker.ready)
    hosts = {*LOOPBACK_HOSTS, host, *allowed_hosts}
    models.peers = worker
    app = create_app(models, lambda: loading.start(loads, server), hosts, token, allowed_origins)
    server = GracefulServer(
        app, models, shutdown_timeout, worker, log_level="warning", access_log=False, server_header=False
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal again after shutdown; the process shall still exit with 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
    if listener is not None:
        log(f"{shown_url(host, listener)} (loading {models.title})")
    with closing(listener) if listener is not None else nullcontext():
        server.run(sockets=[] if listener is None else [listener])
    if not server.engines_stopped:
        # A stuck thread cannot be joined, and would crash in the interpreter's shutdown.
        sys.stderr.flush()
        os._exit(1)
    loading.raise_if_all_failed()


class _Loading:
    """What is said when models are loaded or cannot be; `on_loaded` is called when no more is being loaded."""

    def __init__(self, models: ServedModels, log: Callable[[str], None], on_loaded: Callable[[], None]) -> None:
        self._models, self._log, self._on_loaded = models, log, on_loaded
        self._num_loaded, self._failed = 0, list[Exception]()

    def start(self, loads: Sequence[Load], server: uvicorn.Server) -> None:
        """Load the models; the server ends if none can be."""

        def on_ready(service: Service) -> None:
            self._log(f"{service.name} is ready")
            self._count()

        def on_failure(service: Service, error: Exception) -> None:
            self._failed.append(error)
            if len(self._failed) == len(self._models.services):
                server.should_exit = True
            else:
                self._log(f"{service.name} could not be loaded: {error}")
                self._count()

        self._models.start(loads, on_ready, on_failure)

    def _count(self) -> None:
        self._num_loaded += 1
        if self._num_loaded == len(self._models.services):
            self._on_loaded()

    def raise_if_all_failed(self) -> None:
        """Raise why the first model could not be loaded, if none could be."""
        if len(self._failed) == len(self._models.services):
            raise self._failed[0]
