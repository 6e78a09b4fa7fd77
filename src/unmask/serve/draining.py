"""A server that ends in time: what has begun is finished or, when patience is over, told that it is not."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from unmask.serve.connection import Connection
from unmask.serve.engine import SHUTDOWN_GRACE_SECONDS
from unmask.serve.service import Service

_FINAL_RESPONSE_SECONDS = 2.0
"""Seconds to send the last answers in, after which connections are cut."""


class GracefulServer(uvicorn.Server):
    """The service closes as soon as the server shuts down, so that there still are connections on which to
    tell those who wait."""

    def __init__(self, app: ASGIApp, service: Service, shutdown_timeout: float, **options: Any) -> None:
        limit = math.ceil(shutdown_timeout + SHUTDOWN_GRACE_SECONDS + _FINAL_RESPONSE_SECONDS)
        options = {"http": Connection, "ws": "none", **options}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=limit, **options))
        self.service, self.shutdown_timeout = service, shutdown_timeout
        self.engine_stopped = True
        """Whether the engine has come to its end; else its thread must be left behind."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self.service.close, self.shutdown_timeout))
        await super().shutdown(sockets)
        await self.service.close_regex_compiler()
        self.engine_stopped = await closing
