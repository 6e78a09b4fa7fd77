"""Clients who do not finish what they began, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from live_server import LiveServer, live_server, metric, wait_until
from unmask.serve._connection import Connection, _max_connections
from unmask.serve.service import RequestHandle

HEAD = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"text": "abc", "draws": 16}'


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(Connection, "head_seconds", 0.5)
    monkeypatch.setattr(Connection, "body_seconds", 0.5)
    with live_server() as served:
        yield served


def connected(server: LiveServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", b""),
        (b"GET /he", b"the headers of a request must arrive within 0.5 seconds"),
        (HEAD, b"the headers of a request must arrive"),
        (HEAD + b"Content-Length: 30\r\n\r\n{", b"the body of a request must arrive within 0.5 seconds"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{", b"the body of a request must arrive"),
    ],
)
def test_half_a_request_is_not_waited_for(hasty: LiveServer, sent: bytes, told: bytes) -> None:
    with connected(hasty) as connection:
        connection.sendall(sent)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") if told else answer == b""
    assert told in answer
    assert hasty.http.get("/ready").status_code == 200


def test_byte_by_byte_is_too_slow_as_well(hasty: LiveServer) -> None:
    with connected(hasty) as connection:
        began = time.monotonic()
        slow = b"\r\n" * 4 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100
        with pytest.raises((BrokenPipeError, ConnectionError)):
            _drip(connection, slow)
        assert time.monotonic() - began < 20  # all of it would take 33


def _drip(connection: socket.socket, sent: bytes) -> None:
    for byte in sent:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def test_a_get_with_half_a_body_is_closed_too(hasty: LiveServer) -> None:
    with connected(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc")
        assert rest(connection).startswith(b"HTTP/1.1 200 ")


def test_long_answers_and_several_requests_on_a_connection_are_fine(hasty: LiveServer) -> None:
    model = hasty.service.model.denoiser
    inner = model.forward

    def slowly(*given: object, **named: object) -> object:
        time.sleep(0.2)
        return inner(*given, **named)  # type: ignore[arg-type]

    model.forward = slowly  # type: ignore[method-assign]
    body = {"template": "<mask:8>", "steps": 8, "sampler": "confidence"}
    assert hasty.post("/v1/infill", **body).status_code == 200  # over a second, on a kept connection
    assert hasty.post("/v1/infill", **body).status_code == 200
    request = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    with connected(hasty) as connection:
        connection.sendall(request * 2 + request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        assert rest(connection).count(b"HTTP/1.1 200 ") == 3


def test_where_there_are_too_many_the_idle_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "max_connections", 20)
    with live_server() as server:
        crowd = [connected(server) for _ in range(60)]
        try:
            for each in crowd:
                with suppress(OSError):
                    each.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(3):
                assert httpx.get(f"{server.url}/ready", timeout=20).status_code == 200
            assert rest(crowd[0]) == b""  # closed, long before its time
        finally:
            for each in crowd:
                each.close()


def test_who_is_being_answered_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "max_connections", 2)
    with live_server() as server:
        model, gate = server.service.model.denoiser, threading.Event()
        inner = model.forward

        def waiting(*given: object, **named: object) -> object:
            gate.wait(20)
            return inner(*given, **named)  # type: ignore[arg-type]

        model.forward = waiting  # type: ignore[method-assign]
        codes: list[int] = []
        url, ticket, begun = f"{server.url}/v1/score", server.service.submit, []

        def counted(*given: Any, **named: Any) -> RequestHandle:
            begun.append(ticket(*given, **named))
            return begun[-1]

        monkeypatch.setattr(server.service, "submit", counted)

        def ask() -> None:
            codes.append(httpx.post(url, json=json.loads(BODY), timeout=30).status_code)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda number=number: len(begun) == number)  # type: ignore[misc]
        with connected(server) as connection:
            assert b"all 2 connections of this server are in use" in rest(connection)
        gate.set()
        for thread in threads:
            thread.join()
        assert codes == [200, 200]


def test_two_lengths_are_none(hasty: LiveServer) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(hasty) as connection:
        both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        connection.sendall(HEAD + both + smuggled)
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"either Content-Length or Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_the_number_follows_the_systems() -> None:
    assert 16 <= _max_connections(10**9) <= 10**9
    assert _max_connections(100) <= 100


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little of what is sent, so that little need be sent to fill it."""
    made = Connection.connection_made

    def connection_made(self: Connection, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)


def asked_and_not_read(server: LiveServer, **body: Any) -> socket.socket:
    """A connection whose request is answered with more than it takes unread."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    request = {"template": "<mask:40>", "sampler": "first-hitting", "n": 16, "alternatives": 9, "stream": True, **body}
    data = json.dumps(request).encode()
    head = HEAD.replace(b"/v1/score", b"/v1/infill") + b"Content-Length: %d\r\n\r\n" % len(data)
    connection.sendall(head + data)
    return connection


@pytest.mark.usefixtures("small_buffers")
def test_an_answer_that_is_not_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "read_seconds", 0.5)
    with live_server() as server, asked_and_not_read(server, seed=1) as connection:
        wait_until(lambda: metric(server.http.get("/metrics").text, "unmask_running_sequences") > 0)
        wait_until(lambda: metric(server.http.get("/metrics").text, "unmask_requests_total", route="/v1/infill") == 1)
        assert not rest(connection).endswith(b"0\r\n\r\n")  # it has broken off


@pytest.mark.usefixtures("small_buffers")
def test_an_answer_that_is_read_slowly_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "read_seconds", 0.5)
    monkeypatch.setattr(Connection, "min_bytes_read", 1000)
    with live_server() as server, asked_and_not_read(server, seed=1) as connection:
        found, began = b"", time.monotonic()
        while not found.endswith(b"0\r\n\r\n"):
            time.sleep(0.02 if time.monotonic() < began + 3 else 0)
            part = connection.recv(4096)
            assert part, "the server has broken off"
            found = found[-100:] + part


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_is_too_slow_for_its_drafts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.serve.service._MAX_UNREAD_TOKENS", 5000)
    with live_server() as server:
        with asked_and_not_read(server, seed=1) as connection:
            wait_until(lambda: metric(server.http.get("/metrics").text, "unmask_running_sequences") > 0)
            wait_until(lambda: metric(server.http.get("/metrics").text, "unmask_running_sequences") == 0)
            told = rest(connection)
        assert b"event: error" in told
        assert b"the stream is read more slowly than it is written" in told
        # Whoever reads gets all.
        body = {"template": "<mask:40>", "sampler": "first-hitting", "n": 2, "stream": True}
        assert server.post("/v1/infill", **body).text.count("event: step") == 80
