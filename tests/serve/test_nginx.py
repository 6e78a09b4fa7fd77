"""Two servers behind a real nginx with the configuration of the documents: one is killed under load."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import unmask
from live_server import wait_until
from processes import _free_port
from unmask import DiTConfig, LanguageModel, Tokenizer

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:{ROOT}/.venv/nginx/usr/sbin")

Replicas = tuple[str, list[subprocess.Popen[bytes]], list[int]]

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nginx") / "small"
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=256)
    unmask.save(LanguageModel.from_config(backbone, unmask.MDLM(), Tokenizer.bytes()), path)
    return path


@contextmanager
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server at a port; `wait_ready` says when it answers."""
    command = [sys.executable, "-m", "unmask", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_ready(port: int) -> None:
    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, 180)


@contextmanager
def proxy(folder: Path, *ports: int) -> Iterator[str]:
    """nginx with the configuration of the documents, at a port of its own; its URL."""
    own = _free_port()
    text = CONFIGURATION.read_text()
    for shown, port in zip((8000, 8001, 8002), (own, *ports), strict=True):
        text, count = re.subn(rf"^(\s*(?:listen|server) 127\.0\.0\.1):{shown}\b", rf"\1:{port}", text, flags=re.M)
        assert count == 1
    (folder / "nginx.conf").write_text(text)
    options = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;"
    assert NGINX is not None
    process = subprocess.Popen(
        [NGINX, "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf", "-g", options]
    )
    try:
        wait_ready(own)
        yield f"http://127.0.0.1:{own}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def replicas(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """The URL of the proxy; the servers behind it, and their ports."""
    ports = [_free_port(), _free_port()]
    with server(folder, ports[0]) as one, server(folder, ports[1]) as other:
        for port in ports:
            wait_ready(port)
        with proxy(tmp_path_factory.mktemp("proxy"), *ports) as url:
            yield url, [one, other], ports


def request(seed: int) -> dict[str, Any]:
    return {"template": "ab<mask:24>", "seed": seed, "steps": 24}


def streamed_text(url: str, seed: int) -> str | None:
    """The text of a streamed answer; None if it has broken off."""
    done = None
    try:
        with httpx.stream("POST", f"{url}/v1/infill", json={**request(seed), "stream": True}, timeout=60) as answer:
            assert answer.status_code == 200
            kind = ""
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                kind = value if name == "event" else kind
                if (name, kind) == ("data", "response"):
                    done = json.loads(value)["results"][0]["text"]
    except httpx.RemoteProtocolError:
        return None
    return done


@pytest.mark.thorough
def test_streams_arrive_as_they_are_written(replicas: Replicas) -> None:
    (url, _, _) = replicas
    long = {"template": "<mask:250>", "sampler": "first-hitting", "seed": 1, "n": 4, "stream": True}
    with httpx.stream("POST", f"{url}/v1/infill", json=long, timeout=60) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("event: step")]
    assert len(times) == 1000
    whole = times[-1] - times[0]
    assert whole > 0.2
    # In one piece all would arrive at the end; here half have arrived when half of the time is over.
    middle = sum(at - times[0] < 0.6 * whole for at in times)
    assert 300 < middle < 900


@pytest.mark.thorough
def test_no_request_is_lost_when_a_server_is_killed(folder: Path, replicas: Replicas) -> None:
    (url, (victim, _), ports) = replicas
    texts = {seed: httpx.post(f"http://127.0.0.1:{ports[1]}/v1/infill", json=request(seed)).json() for seed in range(4)}
    expected = {seed: answer["results"][0]["text"] for seed, answer in texts.items()}
    statuses: list[tuple[int, int, bool]] = []
    streams: list[tuple[float, bool]] = []
    over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            count = 0
            while not over.is_set():
                seed = (number + (count := count + 1)) % 4
                answer = client.post("/v1/infill", json=request(seed))
                same = answer.status_code == 200 and answer.json()["results"][0]["text"] == expected[seed]
                statuses.append((number, answer.status_code, same))

    def listen(number: int) -> None:
        while not over.is_set():
            began = time.monotonic()
            text = streamed_text(url, number % 4)
            streams.append((began, text is not None))
            assert text in (None, expected[number % 4])

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(6)] + [pool.submit(listen, n) for n in range(2)]
        wait_until(lambda: len(statuses) >= 40 and len(streams) >= 4, 60)
        before = len(statuses)
        os.kill(victim.pid, signal.SIGKILL)
        death = time.monotonic()
        wait_until(lambda: len(statuses) >= before + 60 and len(streams) >= 10, 60)
        over.set()
        for each in asked:
            each.result()
    assert {(status, same) for _, status, same in statuses} == {(200, True)}
    broken = [began for began, complete in streams if not complete]
    assert all(began <= death for began in broken)  # only what was in flight on the dead server
    assert len(broken) <= 2
    # It comes back, and gets its share again.
    with server(folder, ports[0]):
        wait_ready(ports[0])
        for seed in range(8):
            assert httpx.post(f"{url}/v1/infill", json=request(seed)).status_code == 200
        assert 'route="/v1/infill"' in httpx.get(f"http://127.0.0.1:{ports[0]}/metrics").text
