"""Connections with timeouts: a request must arrive within some seconds, and its answer must be read.

uvicorn has no such timeouts. A few thousand clients that never finish their request, or never read its answer, would
use up the machine's sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from unmask.serve._response_schemas import ErrorResponse

_RESERVED_FILES = 64
"""File descriptors for other uses than connections."""


def _max_connections(default: int = 1024) -> int:
    """The largest number of open connections: the default, or fewer if the process may open fewer files."""
    try:
        import resource
    except ImportError:  # not a Unix
        return default
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return default if allowed < 0 else max(16, min(default, allowed - _RESERVED_FILES))


class Connection(H11Protocol):
    """A connection with timeouts for incoming data, and a limit on open connections.

    Above the limit, the connection that has waited longest for a request is closed: a client that opens idle
    connections mainly closes its own.
    """

    head_seconds: ClassVar[float] = 10.0
    """Seconds from the first byte of a request (or the start of the connection) to the end of its headers."""
    body_seconds: ClassVar[float] = 30.0
    """Seconds from there to the end of the body."""
    read_seconds: ClassVar[float] = 30.0
    """Seconds in which a client must read `min_bytes_read` of an answer that waits for it."""
    min_bytes_read: ClassVar[int] = 30_000
    max_connections: ClassVar[int] = _max_connections()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiving: Literal["head", "body"] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline("head")
        if len(self.connections) > self.max_connections:
            self._evict_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._stop_read_timer()
        super().connection_lost(exc)
        self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        """Close the connection unless the client reads."""
        unread: int = self.transport.get_write_buffer_size()

        def check() -> None:
            if unread - self.transport.get_write_buffer_size() < self.min_bytes_read:
                self.transport.abort()
            else:
                self._wait_for_reader()

        self._read_timer = self.loop.call_later(self.read_seconds, check)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline(received=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline(received=bool(self.conn.trailing_data[0]))

    def _update_deadline(self, received: bool) -> None:
        """Set the timeout for the rest of a request; between requests there is none until data is `received`."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._set_deadline(None)
        elif state is h11.SEND_BODY:
            self._set_deadline("body")
        else:
            self._set_deadline("head" if state is h11.IDLE and received else None)

    def _set_deadline(self, part: Literal["head", "body"] | None) -> None:
        if part == self._receiving and part is not None:
            return  # the timer is running already
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._receiving, self._since = part, self.loop.time()
        if part is not None:
            seconds = self.head_seconds if part == "head" else self.body_seconds
            self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        """Answer with 408; a connection without any data is closed silently."""
        self._timer = None
        if self._receiving == "head" and self.cycle is None and not self.conn.trailing_data[0]:
            self.transport.close()
        else:
            seconds = self.head_seconds if self._receiving == "head" else self.body_seconds
            what = "headers" if self._receiving == "head" else "body"
            self._send_error(408, f"the {what} of a request must arrive within {seconds:g} seconds")

    def _evict_idle(self) -> None:
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        idle = [other for other in others if other._receiving is not None or not other._is_responding]
        if idle:
            min(idle, key=lambda other: other._since).transport.abort()
        else:
            self._send_error(
                503, f"all {self.max_connections:,} connections of this server are in use: try again later"
            )

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _send_error(self, status: int, message: str) -> None:
        """Respond in place of the application, and close."""
        if self.transport.is_closing():
            return
        if self._is_responding:
            self.cycle.disconnected = True  # the application sees that the client has disconnected
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = ErrorResponse.make(message).model_dump_json().encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
