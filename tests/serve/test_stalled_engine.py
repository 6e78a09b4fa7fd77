"""An engine that does not come to the end of its turn: everybody is told, and the server still ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from engine_harness import GatedNetwork, PendingTasks, canvas_ids
from live_server import LiveServer, language_model, live_server, metric, wait_until
from unmask.sampling.factory import make_sampler
from unmask.serve._engine import Engine, EngineClosedError
from unmask.serve._jobs import generation_job
from unmask.serve._metrics import EngineMetrics
from unmask.serve.limits import Limits


@contextmanager
def gated(**options: float) -> Iterator[tuple[LiveServer, GatedNetwork]]:
    lm = language_model()
    gate = GatedNetwork(lm)
    try:
        with live_server(lm, Limits(timeout=30), **options) as served:  # type: ignore[arg-type]
            yield served, gate
    finally:
        gate.open.set()


def asking(served: LiveServer, answers: list[httpx.Response], **body: object) -> threading.Thread:
    asked = {"template": "ab<mask:5>", "steps": 5, **body}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{served.url}/v1/infill", json=asked, timeout=30))
    )
    thread.start()
    return thread


def _rows(served: LiveServer) -> float:
    """Those that wait and those that have begun."""
    text = served.http.get("/metrics").text
    return metric(text, "unmask_running_sequences") + metric(text, "unmask_queued_sequences")


def test_deadlines_hold_and_health_tells_the_truth(caplog: pytest.LogCaptureFixture) -> None:
    with gated(stuck_after=0.3) as (served, gate), caplog.at_level(logging.WARNING):
        answers: list[httpx.Response] = []
        assert served.http.get("/health").status_code == 200
        thread = asking(served, answers, timeout=1)
        wait_until(lambda: gate.num_calls == 1)
        wait_until(lambda: served.http.get("/health").status_code == 503)
        for path in ("/health", "/ready"):
            told = served.http.get(path)
            assert (told.status_code, "may be stuck" in told.json()["error"]["message"]) == (503, True)
        assert served.post("/v1/infill", template="a<mask>").status_code == 503
        wait_until(lambda: metric(served.http.get("/metrics").text, "unmask_stuck_iterations_total") == 1)
        assert metric(served.http.get("/metrics").text, "unmask_iteration_seconds") > 0
        thread.join(10)
        assert answers[0].status_code == 504  # although the engine has not moved
        gate.open.set()
        wait_until(lambda: served.http.get("/health").status_code == 200)
        assert served.post("/v1/infill", template="a<mask>", steps=1).status_code == 200
        wait_until(lambda: "continues" in caplog.text)
        assert "stuck?" in caplog.text


def test_a_stuck_engine_is_left_behind() -> None:
    lm = language_model()
    gate = GatedNetwork(lm)
    engine = Engine(lambda: lm, EngineMetrics())
    waiting = PendingTasks(
        [generation_job(lm, canvas_ids(lm, 6, 0), make_sampler(lm.denoiser, "first-hitting"), 0)] * 2
    )
    engine.submit(waiting.tasks)
    wait_until(lambda: gate.num_calls == 1)
    began = time.monotonic()
    assert not engine.close(shutdown_timeout=0.1)
    assert time.monotonic() - began < 15
    told = waiting.wait()
    assert all(isinstance(result, EngineClosedError) for result in told)
    gate.open.set()
    wait_until(lambda: not engine.alive)
    assert waiting.wait() == told  # nothing is told twice
    assert engine.close()


def test_the_server_ends_and_tells_who_waits(caplog: pytest.LogCaptureFixture) -> None:
    """The engine never answers; a plain request gets 503 and a stream its error, before it is over."""
    answers: list[httpx.Response] = []
    with gated(shutdown_timeout=0.2) as (served, _):
        threads = [asking(served, answers), asking(served, answers, stream=True)]
        wait_until(lambda: _rows(served) == 2)
    for thread in threads:
        thread.join(10)
    plain, streamed = sorted(answers, key=lambda answer: -answer.status_code)
    assert (plain.status_code, plain.json()["error"]["message"]) == (503, "the server is stopping")
    assert streamed.text.rstrip().split("\n\n")[-1].startswith("event: error")
    assert "Traceback" not in caplog.text
    assert "Cancel" not in caplog.text
