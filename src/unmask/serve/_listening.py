"""The address of a server. torch is not needed for it, nor imported."""

from __future__ import annotations

import errno
import ipaddress
import socket


def check_token(host: str, token: str | None) -> None:
    """ValueError if other machines can reach the host, and it has no token."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"{host} can be reached from other machines, so it needs a token: --token SECRET, or the variable"
            " UNMASK_TOKEN"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind_socket(host: str, port: int) -> socket.socket:
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


def shown_url(host: str, listener: socket.socket) -> str:
    """The URL of a listening socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
