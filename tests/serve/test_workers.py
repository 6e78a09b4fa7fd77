"""Several processes behind one port: real ones, which are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import unmask
from live_server import metric, wait_until
from unmask import DiTConfig, LanguageModel, Tokenizer

BODY: dict[str, Any] = {"template": "ab<mask:8>", "seed": 5, "steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workers") / "small"
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=256)
    unmask.save(LanguageModel.from_config(backbone, unmask.MDLM(), Tokenizer.bytes()), path)
    return path


class Workers:
    """A supervisor with its workers."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process, self.url, self.log = process, url, log

    def pids(self) -> set[int]:
        """The processes of the workers."""
        found = set()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                    command = Path(f"/proc/{entry}/cmdline").read_bytes()
                except OSError:
                    continue
                if int(parent) == self.process.pid and b"spawn_main" in command:
                    found.add(int(entry))
        return found

    def forward_passes(self) -> dict[str, float]:
        """How many each worker has made that answers."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        return {one.labels["worker"]: one.value for one in samples if one.name == "unmask_forward_passes_total"}


@contextmanager
def workers(*arguments: str, num_workers: int = 2) -> Iterator[Workers]:
    command = [sys.executable, "-m", "unmask", "serve", *arguments, "--workers", str(num_workers), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+?(?=/)", process.stderr.readline())
        assert found
        stderr = process.stderr
        reading = threading.Thread(target=lambda: log.extend(stderr), daemon=True)
        reading.start()
        wait_until(lambda: sum("is ready" in line for line in log) == num_workers, 180)
        yield Workers(process, found[0], log)
    finally:
        if process.poll() is None:
            process.kill()  # the workers end when it is gone
        process.wait()
        reading.join(20)
        stderr.close()


def mapped_weights(pid: int) -> tuple[int, int]:
    """Bytes of the mapped weights that a process has changed, and all that it uses."""
    own = used = 0
    is_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name:
            is_weights = line.endswith(".weights")
        elif is_weights and name in ("Rss", "Private_Dirty", "Anonymous"):
            size = int(rest.split()[0]) * 1024
            used, own = (used + size, own) if name == "Rss" else (used, own + size)
    return own, used


def ask(url: str, count: int, threads: int = 4) -> Sequence[httpx.Response]:
    """The answers to as many requests, each on a connection of its own."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda _: httpx.post(f"{url}/v1/infill", json=BODY, timeout=60), range(count)))


@pytest.mark.thorough
def test_workers_share_the_work_and_one_that_is_killed_is_started_again(folder: Path) -> None:
    with workers(str(folder)) as served:
        answers = ask(served.url, 24)
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["results"][0]["text"] for answer in answers}) == 1  # whoever wrote it
        passes = served.forward_passes()
        assert passes.keys() == {"0", "1"}
        assert all(count >= 4 for count in passes.values())
        text = httpx.get(f"{served.url}/metrics").text
        assert metric(text, "unmask_requests_total", route="/v1/infill", status="200") == 24
        assert text.count("# TYPE unmask_requests_total") == 1

        for pid in served.pids():
            own, shared = mapped_weights(pid)
            assert (own, shared > 50_000) == (0, True)
        victim = min(served.pids())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: any("SIGKILL" in line for line in served.log))
        assert {answer.status_code for answer in ask(served.url, 8)} == {200}  # while it is started again
        wait_until(lambda: sum("is ready" in line for line in served.log) == 3, 120)
        assert len(served.pids()) == 2
        assert victim not in served.pids()
        assert {answer.status_code for answer in ask(served.url, 8)} == {200}
        assert served.forward_passes().keys() == {"0", "1"}

        left = served.pids()
        long = {"template": "<mask:250>", "sampler": "first-hitting", "seed": 1}
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(httpx.post, f"{served.url}/v1/infill", json=long, timeout=60) for _ in range(2)]
            wait_until(
                lambda: metric(httpx.get(f"{served.url}/metrics").text, "unmask_running_sequences") == 2,
            )
            served.process.send_signal(signal.SIGTERM)
            assert [each.result().status_code for each in asked] == [200, 200]
        assert served.process.wait(20) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    assert not any("Traceback" in line for line in served.log), served.log


@pytest.mark.thorough
def test_workers_end_with_their_supervisor(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with workers(str(folder)) as served:
        left = served.pids()
        (shared,) = tmp_path.glob("unmask-*")
        assert {path.name for path in shared.iterdir()} == {"0.sock", "1.sock", "0.weights"}
        served.process.kill()
        served.process.wait()
        wait_until(lambda: not any(_runs(pid) for pid in left))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{served.url}/health")
        assert not shared.exists()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.thorough
def test_a_model_that_cannot_be_loaded_is_told_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "unmask", "serve", str(tmp_path / "none"), "--workers", "2", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("unmask: ")]
    assert (done.returncode, len(told)) == (2, 1), done.stderr
    assert "is not a folder" in told[0]
    assert "Traceback" not in done.stderr
