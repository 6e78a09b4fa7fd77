"""An engine without a server around it, and what is needed to watch it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from live_server import language_model, wait_until
from unmask import LanguageModel
from unmask.serve._engine import Engine, Task
from unmask.serve._metrics import EngineMetrics


@contextmanager
def running_engine(model: LanguageModel | None = None, **options: int) -> Iterator[Engine]:
    running = Engine(lambda: model or language_model(), EngineMetrics(), **options)
    wait_until(lambda: running.ready)
    try:
        yield running
    finally:
        running.close()


class PendingTasks:
    """Tasks whose results are waited for."""

    def __init__(self, jobs: list[Any], seconds: float = float("inf")) -> None:
        self.results: dict[int, Any] = {}
        self.events: dict[int, list[Any]] = {row: [] for row in range(len(jobs))}
        deadline = time.monotonic() + seconds
        self.tasks = [
            Task(work, self._store_result(row), self.events[row].append, deadline) for row, work in enumerate(jobs)
        ]

    def _store_result(self, row: int) -> Callable[[Any], None]:
        return lambda result: self.results.__setitem__(row, result)

    def wait(self) -> list[Any]:
        wait_until(lambda: len(self.results) == len(self.tasks))
        return [self.results[row] for row in range(len(self.tasks))]


class GatedNetwork:
    """The network, which answers only when it is let; `waits` is how many calls have come."""

    def __init__(self, model: LanguageModel) -> None:
        self.open, self.num_calls = threading.Event(), 0
        inner = model.denoiser.forward

        def forward(*inputs: Any, **options: Any) -> Tensor:
            self.num_calls += 1
            assert self.open.wait(20)
            return inner(*inputs, **options)

        model.denoiser.forward = forward  # type: ignore[method-assign]


def canvas_ids(lm: LanguageModel, holes: int, seed: int) -> list[int]:
    text = "abc defgh "[: 1 + seed % 9]
    return [*lm.tokenizer.encode(text), *[lm.vocab.mask_id] * holes, *lm.tokenizer.encode("fed")]  # type: ignore[union-attr]
