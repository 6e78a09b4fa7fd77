"""Start the server and see it to its end."""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection

from unmask.model import LanguageModel
from unmask.serve.app import create_app
from unmask.serve.draining import GracefulServer
from unmask.serve.middleware import LOOPBACK_HOSTS, validate_origin
from unmask.serve.service import Service


def serve(
    service: Service,
    load: Callable[[], LanguageModel],
    host: str,
    port: int,
    token: str | None = None,
    allowed_hosts: Collection[str] = (),
    shutdown_timeout: float = 30.0,
    allowed_origins: Collection[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> None:
    """Listen until a signal; `load` brings the model while the server already answers /health.

    An address that others can reach needs a token. SIGTERM ends it once what has begun is finished, but not
    later than after `patience` seconds and a few more for telling those who still wait.
    """
    if not _is_loopback(host) and not token:
        raise ValueError(
            f"{host} can be reached by others, so it needs a token: --token SECRET, or the variable UNMASK_TOKEN"
        )
    for origin in allowed_origins:
        validate_origin(origin)
    listening = _bind_socket(host, port)
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
        # uvicorn hands the signal on once all is done; to have finished is no failure.
        signal.signal(signal.SIGTERM, lambda *_: None)
    shown = f"[{host}]" if ":" in host else host
    log(f"http://{shown}:{listening.getsockname()[1]}/ (loading {service.name})")
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
    if not server.engine_stopped:
        # A thread that never ends cannot be waited for, and would be torn apart by the interpreter's end.
        sys.stderr.flush()
        os._exit(1)
    if failed:
        raise failed[0]


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind_socket(host: str, port: int) -> socket.socket:
    """A listening socket, or a sentence about why there is none."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, OverflowError):
        raise ValueError(f"{host}:{port} is no address that a server can listen at") from None
    # Named as TCP, or asyncio leaves Nagle's algorithm on, and every answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is taken by another program; choose another with --port") from None
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listening
