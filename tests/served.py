"""A small model on a real server, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from unmask import MDLM, Autoregression, DiTConfig, LanguageModel, Tokenizer
from unmask.objectives import AnyObjective
from unmask.serve.app import create_app
from unmask.serve.draining import DrainingServer
from unmask.serve.limits import Limits
from unmask.serve.run import listen
from unmask.serve.service import Service

ALPHABET = "abcdefgh \n"
LENGTH = 48


def language_model(objective: AnyObjective | None = None, length: int = LENGTH) -> LanguageModel:
    """In float64, so that a row alone and a row in a batch differ by far less than any probability."""
    objective = objective or MDLM()
    causal = isinstance(objective, Autoregression)
    backbone = DiTConfig(width=16, depth=2, heads=2, length=length, dropout=0.0, causal=causal)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.new(backbone, objective, Tokenizer.characters(ALPHABET))
        for parameter in lm.denoise.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    lm.denoise.double().eval()
    return lm


class Served:
    """A running server."""

    def __init__(self, service: Service, url: str, stop: Callable[[], None]) -> None:
        self.service, self.url, self.stop = service, url, stop
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def serving(
    model: LanguageModel | None = None,
    limits: Limits | None = None,
    token: str | None = None,
    ready: bool = True,
    patience: float = 5,
    origins: Collection[str] = (),
    **options: float,
) -> Iterator[Served]:
    service = Service("tiny", limits or Limits(), **options)  # type: ignore[arg-type]

    def begin() -> None:
        if ready:
            service.begin(lambda: model or language_model())

    listening = listen("127.0.0.1", 0)
    app = create_app(service, begin, {"127.0.0.1", "localhost"}, token, origins)
    server = DrainingServer(app, service, patience, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()
        listening.close()

    served = Served(service, f"http://127.0.0.1:{listening.getsockname()[1]}", stop)
    try:
        until(lambda: server.started and (service.ready or not ready))
        yield served
    finally:
        served.http.close()
        stop()


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
