"""One of several processes behind one port: where its connections come from, and the metrics of all."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from unmask.serve._metrics import render_metrics
from unmask.serve.workers import WorkerSeat

_MAX_HANDED = 64
"""Connections that are taken at once."""
_WATCH_SECONDS = 1.0
"""Seconds between two looks at whether the engines answer."""
_PEER_SECONDS = 1.0
"""Seconds for the metrics of another worker."""


class Worker:
    """The worker's side of a seat.

    Connections arrive as file descriptors; the supervisor is told when one is closed, when the models are loaded, and
    when the engines are stuck, so that connections go to others. If it is gone, the worker ends as after SIGTERM.
    """

    def __init__(self, seat: WorkerSeat) -> None:
        self._seat, self._channel = seat, seat.channel
        self._own_address = seat.folder / f"{seat.index}.sock"
        self._tasks: set[asyncio.Task[object]] = set()

    async def start(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        on_orphaned: Callable[[], None],
        own_metrics: Callable[[], bytes],
        is_alive: Callable[[], bool],
    ) -> None:
        """Take connections from now on, and tell the metrics to the other workers."""
        self._loop, self._make_protocol, self._on_orphaned = asyncio.get_running_loop(), make_protocol, on_orphaned
        self._channel.setblocking(False)

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                writer.write(own_metrics())
                await writer.drain()
                writer.close()

        self._own_address.unlink(missing_ok=True)  # of one that died
        self._server = await asyncio.start_unix_server(tell, self._own_address)
        self._loop.add_reader(self._channel, self._receive)
        self._watching = self._loop.create_task(self._watch(is_alive))
        self._tell(b"up\n")

    async def _watch(self, is_alive: Callable[[], bool]) -> None:
        """Tell when the engines are stuck, and when they go on."""
        was_alive = True
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if is_alive() != was_alive:
                was_alive = not was_alive
                self._tell(b"ready {}\n" if was_alive else b"stuck\n")

    async def stop(self) -> None:
        """Take what has been handed over, and no more."""
        self._watching.cancel()
        self._loop.remove_reader(self._channel)
        while self._receive():
            pass
        self._server.close()
        await asyncio.gather(*self._tasks)

    def ready(self) -> None:
        """The models are loaded; called in any thread."""
        line = b"ready " + json.dumps(self._seat.measured).encode() + b"\n"
        self._loop.call_soon_threadsafe(self._tell, line)

    def connection_closed(self) -> None:
        """A connection that was handed over has ended."""
        self._tell(b"closed\n")

    def _tell(self, line: bytes) -> None:
        # A few bytes, which the supervisor reads as they come; if it is gone there is nobody to tell.
        with suppress(OSError):
            self._channel.send(line)

    def _receive(self) -> bool:
        """Take a connection, or several; false if there is none."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, _MAX_HANDED, _MAX_HANDED)
        except BlockingIOError:
            return False
        except OSError:
            data, descriptors = b"", []
        if descriptors:
            self._tell(b"taken %d\n" % len(descriptors))
        for descriptor in descriptors:
            connection = socket.socket(fileno=descriptor)
            connection.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not data:
            self._loop.remove_reader(self._channel)
            shutil.rmtree(self._seat.folder, ignore_errors=True)  # which the supervisor would have done
            self._on_orphaned()
        return bool(data)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has gone already
            connection.close()
            self.connection_closed()

    async def render_metrics(self, own: bytes) -> bytes:
        """The metrics of all workers that answer, each with its number; `own` are those of this one."""
        others = [path for path in self._seat.folder.glob("*.sock") if path != self._own_address]
        texts = await asyncio.gather(*map(_read_all, others))
        told = {**dict(zip(others, texts, strict=True)), self._own_address: own}
        return render_metrics(
            ({"worker": address.stem}, text_string_to_metric_families(told[address].decode()))
            for address in sorted(told)
        )


async def _read_all(address: Path) -> bytes:
    """What a worker tells; nothing if it does not answer."""
    try:
        async with asyncio.timeout(_PEER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(address)
            try:
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
