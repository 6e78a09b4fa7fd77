"""Several models in one server: requests choose by name, and nothing that one does stops another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from engine_harness import GatedNetwork
from labelled import classifier
from live_server import LiveServer, language_model, live_server, metric, wait_until
from unmask import LanguageModel, NextToken
from unmask.sampling.factory import make_sampler
from unmask.serve.limits import Limits
from unmask.serve.models import ServedModels
from unmask.serve.service import Service

REQUEST: dict[str, Any] = {"template": "ab<mask:6>", "seed": 3, "steps": 6}


@contextmanager
def several(first: LanguageModel | None = None) -> Iterator[LiveServer]:
    """A language model, another whose texts differ, a classifier, and one that cannot be loaded."""

    def unreadable() -> LanguageModel:
        raise ValueError("its weights are damaged")

    others = {
        Service("broken", Limits()): unreadable,
        Service("next", Limits(n=2)): lambda: language_model(NextToken()),
        Service("reviews", Limits(), classifies=True): classifier,
    }
    with live_server(first, others=others, stuck_after=0.3) as served:
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        yield served


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with several() as served:
        yield served


def test_requests_choose_by_name(server: LiveServer) -> None:
    for name, lm in (("tiny", language_model()), ("next", language_model(NextToken()))):
        answer = server.post("/v1/infill", **REQUEST, model=name).json()
        expected = lm.infill(REQUEST["template"], seed=3, sampler=make_sampler(lm.denoiser, "default", 6)).text
        assert (answer["model"], answer["results"][0]["text"]) == (name, expected)
    assert server.post("/v1/infill", **REQUEST).json()["model"] == "tiny"  # the first one
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/score", {"text": "abc", "draws": 16}),
        ("/v1/tokenize", {"text": "abc"}),
    ):
        for name in ("tiny", "next"):
            assert server.post(path, **body, model=name).status_code == 200
    assert server.post("/v1/classify", texts=["ab"]).json()["model"] == "reviews"  # the first that can
    assert server.post("/v1/tokenize", text="ab", model="reviews").status_code == 200


def test_each_has_its_own_limits(server: LiveServer) -> None:
    assert server.post("/v1/infill", **REQUEST, n=3, model="tiny").status_code == 200
    told = server.post("/v1/infill", **REQUEST, n=3, model="next")
    assert (told.status_code, told.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/v1/infill", {**REQUEST, "model": "nexd"}, 404, "there is no model 'nexd' here (did you mean next?)"),
        ("/v1/infill", {**REQUEST, "model": "reviews"}, 404, "'reviews' is no language model; this server has 'tiny',"),
        ("/v1/classify", {"texts": ["a"], "model": "tiny"}, 404, "the model 'tiny' is no classifier"),
        ("/v1/infill", {**REQUEST, "model": "broken"}, 503, "the model 'broken' could not be loaded"),
        ("/v1/tokenize", {"text": "a", "model": ""}, 404, "there is no model '' here"),
    ],
)
def test_names_that_do_not_fit(server: LiveServer, path: str, body: Any, status: int, sentence: str) -> None:
    told = server.http.post(path, json=body)
    assert (told.status_code, sentence in told.json()["error"]["message"]) == (status, True), told.text
    assert "damaged" not in told.text  # what is wrong in the server is for its log


def test_the_server_tells_of_each(server: LiveServer) -> None:
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["tiny", "next", "reviews"]
    assert server.http.get("/v1/models/reviews").json()["labels"] == ["no", "yes", "perhaps"]
    states = {"tiny": "ready", "broken": "failed", "next": "ready", "reviews": "ready"}
    for path, status in (("/health", "alive"), ("/ready", "ready")):
        assert server.http.get(path).json() == {"status": status, "models": states}
        assert server.http.get(path, params={"model": "next"}).status_code == 200
        assert server.http.get(path, params={"model": "broken"}).status_code == 503
        assert server.http.get(path, params={"model": "none"}).status_code == 404
    text = server.http.get("/metrics").text
    before = {name: metric(text, "unmask_forward_passes_total", model=name) for name in states}
    server.post("/v1/infill", **REQUEST, model="next")
    text = server.http.get("/metrics").text
    grown = {name for name in states if metric(text, "unmask_forward_passes_total", model=name) > before[name]}
    assert grown == {"next"}
    assert text.count("# TYPE unmask_forward_passes_total") == 1


def test_the_long_work_of_one_does_not_stop_the_others() -> None:
    lm = language_model()
    gate = GatedNetwork(lm)
    try:
        with several(lm) as served:
            stuck = threading.Thread(
                target=lambda: httpx.post(f"{served.url}/v1/infill", json={**REQUEST, "timeout": 2}, timeout=30)
            )
            stuck.start()
            wait_until(lambda: served.http.get("/health", params={"model": "tiny"}).status_code == 503)
            assert served.http.get("/health").json()["models"]["tiny"] == "stuck"
            assert served.http.get("/ready").status_code == 200
            began = time.monotonic()
            assert served.post("/v1/infill", **REQUEST, model="next").status_code == 200
            assert served.post("/v1/classify", texts=["ab"]).status_code == 200
            assert time.monotonic() - began < 5
            assert served.post("/v1/infill", **REQUEST).status_code == 503  # and no other model answers in its place
            gate.open.set()
            stuck.join()
    finally:
        gate.open.set()


def test_the_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    models = ServedModels([Service(name, Limits()) for name in "abc"])
    ready: list[str] = []
    models.start([language_model] * 3, lambda service: ready.append(service.name))
    wait_until(lambda: len(ready) == 3)
    assert (ready, counts) == (["a", "b", "c"], [2, 2, 2])
    for service in models.services:
        assert service.close(5)


def test_names_are_different() -> None:
    with pytest.raises(ValueError, match="two models are called 'a': give them different names"):
        ServedModels([Service("a", Limits()), Service("a", Limits())])
