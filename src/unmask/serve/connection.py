"""Connections that are not kept waiting for: a request must have arrived within some seconds.

uvicorn waits for as long as a client likes. A few thousand clients who never finish their request would then
use up the sockets of the machine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SPARE_FILES = 64
"""What a process opens beside its connections."""


def most_connections(wanted: int = 1024) -> int:
    """How many connections may be open at a time: so many, or as many as this process may open files."""
    try:
        import resource
    except ImportError:  # not a Unix
        return wanted
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if allowed < 0 else max(16, min(wanted, allowed - SPARE_FILES))


class Connection(H11Protocol):
    """A connection with a clock for what arrives, and one of at most so many.

    Where there are too many, the one that has kept everybody waiting longest for its request is closed, so
    that whoever opens connections to say nothing only closes their own.
    """

    head_seconds: ClassVar[float] = 10.0
    """From the first byte of a request (or the beginning of the connection) to the end of its headers."""
    body_seconds: ClassVar[float] = 30.0
    """From there to the end of the body."""
    most: ClassVar[int] = most_connections()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._part: Literal["head", "body"] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("head")
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(came=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(came=bool(self.conn.trailing_data[0]))

    def _look(self, came: bool) -> None:
        """What of a request is still to come; between two of them, nothing is, until something `came`."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._await(None)
        elif state is h11.SEND_BODY:
            self._await("body")
        else:
            self._await("head" if state is h11.IDLE and came else None)

    def _await(self, part: Literal["head", "body"] | None) -> None:
        if part == self._part and part is not None:
            return  # its clock runs already
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._part, self._since = part, self.loop.time()
        if part is not None:
            seconds = self.head_seconds if part == "head" else self.body_seconds
            self._timer = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """Say so, unless there is nobody who has said anything."""
        self._timer = None
        if self._part == "head" and self.cycle is None and not self.conn.trailing_data[0]:
            self.transport.close()
        else:
            seconds = self.head_seconds if self._part == "head" else self.body_seconds
            what = "headers" if self._part == "head" else "body"
            self._refuse(408, f"the {what} of a request must arrive within {seconds:g} seconds")

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        idle = [each for each in others if each._part is not None or not each._is_answering]
        if idle:
            min(idle, key=lambda each: each._since).transport.abort()
        else:
            self._refuse(503, f"all {self.most:,} connections of this server are in use: try again later")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close."""
        if self.transport.is_closing():
            return
        if self._is_answering:
            self.cycle.disconnected = True  # the application is told that there is nobody any more
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            problem = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = json.dumps({"error": problem}).encode()
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
