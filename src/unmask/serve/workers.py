"""Several processes behind one port: each has the models, and answers the connections that it is handed.

This process accepts connections and hands each to the worker with the fewest, so that they are spread evenly and none
waits for a worker that is loading, or is lost in the queue of one that has died. (Listening sockets of their own,
SO_REUSEPORT, would do neither, nor spread connections at all on macOS; one that all workers inherit leaves bursts to
the first that wakes.) It restarts workers that die, and imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.serve._listening import bind_socket, check_token, shown_url

if TYPE_CHECKING:
    from torch import nn

_CLOSING_SECONDS = 8.0
"""Seconds beyond the shutdown timeout after which workers that have not ended are killed."""
_MAX_RESTART_SECONDS = 30.0
"""The longest wait before a worker is started again that has died several times while it was loading."""
_RETRY_SECONDS = 0.02
"""Seconds until a connection is offered again that no worker could take."""


@dataclass(frozen=True)
class WorkerSeat:
    """What a worker process is given: its number, the socket that brings it connections, a folder with the weights that
    all workers share and a socket for each worker's metrics, and what the first worker has measured, for those after
    it."""

    index: int
    channel: socket.socket
    folder: Path
    measured: dict[str, str]


@dataclass(eq=False)
class _Worker:
    index: int
    process: SpawnProcess
    channel: socket.socket
    unread: bytes = b""
    is_up: bool = False
    """Whether it answers requests."""
    is_ready: bool = False
    """Whether its models are loaded, and not stuck."""
    num_connections: int = 0
    untaken: deque[socket.socket] = field(default_factory=deque)
    """Connections that it was handed and has not taken yet: if it dies, another one gets them."""
    last_handed: float = field(default_factory=time.monotonic)


class Supervisor:
    """Runs `work(seat)` in `num_workers` processes until a signal arrives; `run` returns the exit code.

    The first worker loads its models alone: the others start when it is ready, with what it has measured. If it ends
    before, so does the supervisor, with its exit code.
    """

    def __init__(
        self,
        work: Callable[[WorkerSeat], None],
        num_workers: int,
        listener: socket.socket,
        shutdown_timeout: float,
        log: Callable[[str], None],
    ) -> None:
        self._work, self._num_workers, self._listener = work, num_workers, listener
        self._shutdown_timeout, self._log = shutdown_timeout, log
        self._workers: dict[int, _Worker] = {}
        self._deaths = dict.fromkeys(range(num_workers), 0)
        self._measured: dict[str, str] | None = None
        self._exit_code = 0
        self._stopping = self._accepting = False

    def run(self) -> int:
        """Supervise until all workers have ended."""
        # Threads of all workers together: one for each core. Given by the user, it is the number of each worker's.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // self._num_workers)))
        self._folder = Path(tempfile.mkdtemp(prefix="unmask-"))
        try:
            return asyncio.run(self._run())
        finally:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self) -> int:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._listener.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        self._start(0)
        await self._ended.wait()
        return self._exit_code

    def _start(self, index: int) -> None:
        if self._stopping:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        seat = WorkerSeat(index, theirs, self._folder, self._measured or {})
        process = multiprocessing.get_context("spawn").Process(target=self._work, args=(seat,))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which tells the workers
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
            theirs.close()
        worker = self._workers[index] = _Worker(index, process, ours)
        self._loop.add_reader(process.sentinel, self._on_end, worker)
        self._loop.add_reader(ours, self._on_message, worker)

    def _on_message(self, worker: _Worker) -> None:
        """A worker is up, is ready, is stuck, or has taken or closed connections."""
        try:
            data = worker.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(worker.channel)
            return
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        for line in lines:
            kind, _, rest = line.partition(b" ")
            if kind == b"closed":
                worker.num_connections -= 1
            elif kind == b"taken":
                for _ in range(int(rest)):
                    worker.untaken.popleft().close()
            elif kind == b"up":
                worker.is_up = True
            elif kind == b"stuck":
                worker.is_ready = False
            elif kind == b"ready":
                self._on_ready(worker, json.loads(rest))
        self._accept()

    def _on_ready(self, worker: _Worker, measured: dict[str, str]) -> None:
        worker.is_ready = True
        self._deaths[worker.index] = 0
        if self._measured is None:
            self._measured = measured
            for index in range(1, self._num_workers):
                self._start(index)

    def _accept(self) -> None:
        """Accept connections if there is a worker that could take them."""
        wanted = not self._stopping and any(worker.is_up for worker in self._workers.values())
        if wanted and not self._accepting:
            self._loop.add_reader(self._listener, self._on_connection)
        elif self._accepting and not wanted:
            self._loop.remove_reader(self._listener)
        self._accepting = wanted

    def _on_connection(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """Give a connection to the worker with the fewest; those that are loading or stuck come last."""
        up = [worker for worker in self._workers.values() if worker.is_up]
        for worker in sorted(up, key=lambda one: (not one.is_ready, one.num_connections, one.last_handed)):
            try:
                socket.send_fds(worker.channel, [b"c"], [connection.fileno()])
            except OSError:  # it is dying, or has not taken many others yet
                continue
            worker.num_connections += 1
            worker.untaken.append(connection)
            worker.last_handed = time.monotonic()
            return
        if self._stopping:
            connection.close()
        else:
            self._loop.call_later(_RETRY_SECONDS, self._hand_over, connection)

    def _on_end(self, worker: _Worker) -> None:
        """A worker has ended: start it again, unless it shall end or cannot be started."""
        self._loop.remove_reader(worker.process.sentinel)
        self._loop.remove_reader(worker.channel)
        worker.channel.close()
        worker.process.join()
        code = worker.process.exitcode or 0
        del self._workers[worker.index]
        self._accept()
        for connection in worker.untaken:
            self._hand_over(connection)
        if self._stopping:
            was_starting = code == -signal.SIGTERM and not worker.is_up
            self._exit_code = self._exit_code or (0 if was_starting else code if code >= 0 else 1)
        elif self._measured is None:  # the first one has told why
            self._exit_code, self._stopping = code if code > 0 else 1, True
            if code <= 0:
                self._log(f"the first worker was ended by {_cause(code)} while it was loading")
        else:
            self._restart(worker, code)
        if self._stopping and not self._workers:
            self._ended.set()

    def _restart(self, worker: _Worker, code: int) -> None:
        deaths = self._deaths[worker.index]
        self._deaths[worker.index] += 1
        seconds = min(_MAX_RESTART_SECONDS, 2.0**deaths) if deaths else 0.0
        when = f" in {seconds:g} seconds" if seconds else ""
        self._log(f"worker {worker.index} was ended by {_cause(code)}; it is started again{when}")
        self._loop.call_later(seconds, self._start, worker.index)

    def _stop(self) -> None:
        """Accept nothing more, and let workers finish what they have begun; the second time, end them."""
        if self._stopping:
            self._kill()
            return
        self._stopping = True
        self._accept()
        self._listener.close()
        for worker in self._workers.values():
            worker.process.terminate()
        self._loop.call_later(self._shutdown_timeout + _CLOSING_SECONDS, self._kill)
        if not self._workers:
            self._ended.set()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()


def serve_workers(
    work: Callable[[WorkerSeat], None],
    num_workers: int,
    host: str,
    port: int,
    token: str | None,
    shutdown_timeout: float,
    title: str,
    log: Callable[[str], None],
) -> int:
    """Listen at an address with several processes, each of which runs `work`; the exit code."""
    check_token(host, token)
    listener = bind_socket(host, port)
    log(f"{shown_url(host, listener)} (loading {title} in {num_workers} workers)")
    return Supervisor(work, num_workers, listener, shutdown_timeout, log).run()


def share_weights(network: nn.Module, seat: WorkerSeat, index: int) -> None:
    """Keep the weights of the model of that index once for all workers."""
    from unmask.serve._shared_weights import share_weights as share

    share(network, seat.folder / f"{index}.weights")


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _num_cores() -> int:
    """The cores that this process may use."""
    affinity: Callable[[int], Any] | None = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
