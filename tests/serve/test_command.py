"""`unmask serve` as a process of its own: signals, ports, addresses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import unmask
from live_server import language_model, metric, wait_until
from processes import run_program
from unmask import DiTConfig, LanguageModel, Tokenizer
from unmask.serve._listening import bind_socket, is_loopback
from unmask.serve.limits import Limits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "small"
    lm = LanguageModel.from_config(
        DiTConfig(width=32, depth=2, heads=2, max_length=256), unmask.MDLM(), Tokenizer.bytes()
    )
    unmask.save(lm, path)
    return path


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unmask", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = command(*arguments, "--port", "0", **environment)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+?(?=/)", line)
        assert found, line
        wait_until(lambda: _ready(found[0]))
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200 and httpx.get(f"{url}/ready").status_code != 503
    except httpx.TransportError:
        return False


def num_running(url: str) -> float:
    """The sequences that all models have begun."""
    return metric(httpx.get(f"{url}/metrics").text, "unmask_running_sequences")


def refused(*arguments: str, **environment: str) -> str:
    done = run_program("unmask", "serve", *arguments, environment=environment, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    told = [line for line in done.stderr.splitlines() if line.startswith("unmask: ")]
    assert len(told) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "http://" not in done.stderr or Path(arguments[0]).exists()  # what is not there is not announced
    return told[0]


def test_sigterm_finishes_what_has_begun(folder: Path) -> None:
    with started(str(folder)) as (process, url):
        answers: list[httpx.Response] = []
        body = {"template": "<mask:250>", "sampler": "first-hitting", "seed": 1, "n": 2}
        asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/infill", json=body, timeout=60)))
        asking.start()
        wait_until(lambda: num_running(url) == 2)
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert answers[0].status_code == 200
        assert len(answers[0].json()["results"]) == 2
        assert process.wait(20) == 0


def test_impatience_ends_it_all_the_same(folder: Path) -> None:
    with started(str(folder), "--shutdown-timeout", "1") as (process, url):
        body = {"template": "<mask:250>", "sampler": "first-hitting", "n": 16}

        def ask() -> None:
            with pytest.raises(httpx.HTTPError):
                httpx.post(f"{url}/v1/infill", json=body, timeout=60).raise_for_status()

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: num_running(url) == 16)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        assert time.monotonic() - began < 8
        asking.join()


def test_a_port_is_taken_once(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} of 127.0.0.1 is in use by another program" in refused(str(folder), "--port", port)


def test_bad_starts_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    assert "is not a folder" in refused(str(tmp_path / "none"), "--port", "0")
    assert "needs a token" in refused(str(folder), "--host", "0.0.0.0", "--port", "0", UNMASK_TOKEN="")
    assert "not an address" in refused(str(folder), "--host", "no.such.host.invalid", "--token", "x")
    assert "prefix_cache_mb must be at least 0; got -1" in refused(str(folder), "--prefix-cache-mb", "-1")
    assert "from 0 to 65535" in refused(str(folder), "--port", "65536")
    for patience in ("-1", "nan", "inf"):
        assert "must be 0 seconds or more" in refused(str(folder), f"--shutdown-timeout={patience}")
    assert "'my.site' is not an origin" in refused(str(folder), "--allow-origin", "my.site")
    unmask.save(LanguageModel(language_model().denoiser.float()), tmp_path / "ids")
    assert "has no tokenizer.json" in refused(str(tmp_path / "ids"), "--port", "0")


def test_a_model_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "large" / name).write_bytes((folder / name).read_bytes())
    config = (folder / "config.json").read_text().replace('"width": 32', '"width": 40000000000')
    (tmp_path / "large" / "config.json").write_text(config)
    assert "tokens of width 40,000,000,000" in refused(str(tmp_path / "large"), "--port", "0")


def test_the_token_may_come_from_the_environment(folder: Path) -> None:
    with started(str(folder), "--host", "0.0.0.0", "--allow-host", "other.name", UNMASK_TOKEN="x") as (
        _,
        url,
    ):
        port = url.rsplit(":", 1)[1]
        local = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(local).status_code == 401
        key = {"Authorization": "Bearer x"}
        wait_until(lambda: httpx.get(local, headers=key).status_code == 200)  # once the model is there
        assert httpx.get(local, headers={**key, "Host": "other.name"}).status_code == 200
        assert httpx.get(local, headers={**key, "Host": "another.name"}).status_code == 400


def test_answers_do_not_wait_for_more_to_send() -> None:
    """asyncio switches Nagle's algorithm off only on sockets that say they are TCP."""
    with bind_socket("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP


def test_limits_are_limits() -> None:
    with pytest.raises(ValueError, match="the limit n must be above 0; got 0"):
        Limits(n=0)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


NEVER = """
import sys, threading
from unmask import load
from unmask.serve.limits import Limits
from unmask.serve.server import serve
from unmask.serve.models import ServedModels
from unmask.serve.service import Service

def never():
    lm = load(sys.argv[1])
    lm.denoiser.forward = lambda *_, **__: threading.Event().wait()
    return lm

service = Service("never", Limits())
serve(ServedModels([service]), [never], "127.0.0.1", 0, shutdown_timeout=0.5, log=lambda line: print(line, flush=True))
"""


def test_sigterm_ends_a_server_whose_engine_does_not_answer(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", NEVER, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=/)", process.stdout.readline())
        assert found
        url = found[0]
        wait_until(lambda: _ready(url))
        answers: list[httpx.Response] = []
        body = {"template": "<mask>", "stream": True}
        asking = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/infill", json=body, timeout=60)))
        asking.start()
        wait_until(lambda: num_running(url) == 1)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        asking.join()
    finally:
        process.kill()
    assert process.returncode == 1
    assert "event: error" in answers[0].text
    assert ("is abandoned" in log, "Traceback" in log) == (True, False)


def test_a_stream_beyond_patience_ends_with_an_error(folder: Path) -> None:
    with started(str(folder), "--shutdown-timeout", "1") as (process, url):
        body = {"template": "<mask:250>", "sampler": "first-hitting", "n": 16, "stream": True}
        texts: list[str] = []
        asking = threading.Thread(
            target=lambda: texts.append(httpx.post(f"{url}/v1/infill", json=body, timeout=60).text)
        )
        asking.start()
        wait_until(lambda: num_running(url) == 16)
        process.send_signal(signal.SIGTERM)
        asking.join()
        assert process.wait(20) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    assert texts[0].rstrip().split("\n\n")[-1].startswith("event: error")
    assert "Traceback" not in log
