"""A small model on a real server, on a port of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from unmask import MDLM, DiTConfig, LanguageModel, NextToken, Tokenizer
from unmask.objectives import Objective
from unmask.serve._app import create_app
from unmask.serve._listening import bind_socket
from unmask.serve.limits import Limits
from unmask.serve.models import Load, ServedModels
from unmask.serve.server import GracefulServer
from unmask.serve.service import Service

ALPHABET = "abcdefgh \n"
LENGTH = 48


def language_model(objective: Objective | None = None, length: int = LENGTH) -> LanguageModel:
    """In float64, so that a row alone and a row in a batch differ by far less than any probability."""
    objective = objective or MDLM()
    causal = isinstance(objective, NextToken)
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=length, dropout=0.0, causal=causal)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.from_config(backbone, objective, Tokenizer.characters(ALPHABET))
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    lm.denoiser.double().eval()
    return lm


class LiveServer:
    """A running server."""

    def __init__(self, service: Service, url: str, stop: Callable[[], None]) -> None:
        self.service, self.url, self.stop = service, url, stop
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def live_server(
    model: Any = None,
    limits: Limits | None = None,
    token: str | None = None,
    ready: bool = True,
    shutdown_timeout: float = 5,
    allowed_origins: Collection[str] = (),
    others: Mapping[Service, Load] | None = None,
    **options: Any,
) -> Iterator[LiveServer]:
    service = Service("tiny", limits or Limits(), **options)
    models = ServedModels([service, *(others or {})])

    def on_startup() -> None:
        if ready:
            models.start([lambda: model or language_model(), *(others or {}).values()])

    listening = bind_socket("127.0.0.1", 0)
    app = create_app(models, on_startup, {"127.0.0.1", "localhost"}, token, allowed_origins)
    server = GracefulServer(app, models, shutdown_timeout, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()
        listening.close()

    served = LiveServer(service, f"http://127.0.0.1:{listening.getsockname()[1]}", stop)
    try:
        wait_until(lambda: server.started and (service.ready or not ready))
        yield served
    finally:
        served.http.close()
        stop()


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
