"""The models of a server: each with its engine and limits, chosen by requests by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from unmask.classification import Classifier
from unmask.config import suggest
from unmask.model import LanguageModel
from unmask.serve._metrics import RequestMetrics, render_metrics
from unmask.serve._response_schemas import ModelCard
from unmask.serve._worker import Worker
from unmask.serve.service import NotReadyError, Service, UnknownModelError

Load = Callable[[], LanguageModel | Classifier]


class ServedModels:
    """Language models and classifiers in the order in which they were given; a request without a name means the first
    one that can answer it.

    Each has a thread of its own, and its share of the cores: a model that computes for long takes no more than that,
    and threads of two models that wait for each other's cores would be slower than either alone.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        names = [service.name for service in services]
        if not names:
            raise ValueError("a server needs a model; none was given")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name!r}: give them different names, as in other={name}")
        self.services, self.metrics = tuple(services), RequestMetrics()
        self.peers: Worker | None = None
        """This process as one of several behind a port."""
        self.language_models = tuple(service for service in services if not service.classifies)
        self.classifiers = tuple(service for service in services if service.classifies)

    @property
    def body_bytes(self) -> int:
        """The largest request that any model takes."""
        return max(service.limits.body_bytes for service in self.services)

    @property
    def title(self) -> str:
        """The names of all models."""
        return ", ".join(service.name for service in self.services)

    def choose(self, name: str | None) -> Service:
        """The model of that name."""
        return self._choose(name, self.services)

    def language_model(self, name: str | None) -> Service:
        """The language model of that name."""
        return self._choose(name, self.language_models)

    def classifier(self, name: str | None) -> Service:
        """The classifier of that name."""
        return self._choose(name, self.classifiers)

    def _choose(self, name: str | None, candidates: Sequence[Service]) -> Service:
        found = next((service for service in candidates if name in (None, service.name)), None)
        if found is not None:
            return found
        names = [service.name for service in candidates]
        listed = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}" if len(names) > 1 else repr(names[0])
        if name in {service.name for service in self.services}:
            kind = "language model" if candidates is self.language_models else "classifier"
            raise UnknownModelError(f"the model {name!r} is no {kind}; this server has {listed} for such requests")
        raise UnknownModelError(f"there is no model {name!r} here{suggest(str(name), names)}; this server has {listed}")

    def start(
        self,
        loads: Sequence[Load],
        on_ready: Callable[[Service], None] = lambda _: None,
        on_failure: Callable[[Service, Exception], None] = lambda _, __: None,
    ) -> None:
        """Load the models one after another, so that what is measured while one is loaded is not disturbed by others.

        A model that cannot be loaded does not stop those after it.
        """
        share = max(1, torch.get_num_threads() // len(self.services)) if len(self.services) > 1 else None
        before = threading.Event()
        before.set()
        for service, load in zip(self.services, loads, strict=True):
            loaded = threading.Event()
            service.start(
                partial(_load_in_turn, load, share, before, loaded),
                partial(on_ready, service),
                partial(on_failure, service),
            )
            before = loaded

    async def close(self, shutdown_timeout: float) -> bool:
        """Finish running requests of all models, then stop; returns whether all engines' threads have ended."""
        closing = [asyncio.to_thread(service.close, shutdown_timeout) for service in self.services]
        return all(await asyncio.gather(*closing))

    async def close_structure_compilers(self) -> None:
        """Stop the processes that compile structures."""
        await asyncio.gather(*(service.close_structure_compiler() for service in self.services))

    def states(self) -> dict[str, str]:
        """What each model is at: loading, ready, stuck, failed or stopped."""
        return {service.name: service.state for service in self.services}

    def render_own_metrics(self) -> bytes:
        """The metrics of this process: of its requests, and of each engine with its model's name."""
        engines = [({"model": service.name}, service.metrics.registry.collect()) for service in self.services]
        return render_metrics([({}, self.metrics.registry.collect()), *engines])

    async def render_metrics(self) -> bytes:
        """The metrics in the text format of Prometheus; of all workers, if this process is one of several."""
        own = self.render_own_metrics()
        return own if self.peers is None else await self.peers.render_metrics(own)

    def check_alive(self, name: str | None) -> None:
        """Raise if the model of that name has ended or is stuck; without a name, if no model is left."""
        self._require_one(name, Service.check_alive)

    def check_ready(self, name: str | None) -> None:
        """Raise if the model of that name is not ready; without a name, if one is being loaded, or none is ready."""
        if name is None and any(service.state == "loading" for service in self.services):
            raise NotReadyError("the model is still being loaded: try again in a few seconds")
        self._require_one(name, Service.check_ready)

    def cards(self) -> list[ModelCard]:
        """The models that are ready; NotReadyError if none is."""
        self._require_one(None, Service.check_ready)
        return [service.model_card() for service in self.services if service.ready]

    def _require_one(self, name: str | None, check: Callable[[Service], None]) -> None:
        """Raise what is raised for the first model, if it is raised for all that are asked for."""
        first: Exception | None = None
        for service in self.services if name is None else [self.choose(name)]:
            try:
                check(service)
            except Exception as error:
                first = first or error
            else:
                return
        assert first is not None
        raise first


def _load_in_turn(
    load: Load, num_threads: int | None, before: threading.Event, loaded: threading.Event
) -> LanguageModel | Classifier:
    """Load in the engine's thread, which computes with so many threads from now on (torch keeps it by thread)."""
    before.wait()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        return load()
    finally:
        loaded.set()
