"""An engine without a server around it, and what is needed to watch it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from served import language_model, until
from unmask import LanguageModel
from unmask.serve.engine import Engine, Task
from unmask.serve.metrics import Metrics


@contextmanager
def engine(model: LanguageModel | None = None, **options: int) -> Iterator[Engine]:
    running = Engine(lambda: model or language_model(), Metrics(), **options)
    until(lambda: running.ready)
    try:
        yield running
    finally:
        running.close()


class Waiting:
    """Tasks whose results are waited for."""

    def __init__(self, works: list[Any], seconds: float = float("inf")) -> None:
        self.results: dict[int, Any] = {}
        self.told: dict[int, list[Any]] = {row: [] for row in range(len(works))}
        deadline = time.monotonic() + seconds
        self.tasks = [
            Task(work, self._putter(row), self.told[row].append, deadline) for row, work in enumerate(works)
        ]

    def _putter(self, row: int) -> Callable[[Any], None]:
        return lambda result: self.results.__setitem__(row, result)

    def wait(self) -> list[Any]:
        until(lambda: len(self.results) == len(self.tasks))
        return [self.results[row] for row in range(len(self.tasks))]


class Gate:
    """The network, which answers only when it is let; `waits` is how many calls have come."""

    def __init__(self, model: LanguageModel) -> None:
        self.open, self.waits = threading.Event(), 0
        inner = model.denoise.forward

        def forward(*inputs: Any, **context: Any) -> Tensor:
            self.waits += 1
            assert self.open.wait(20)
            return inner(*inputs, **context)

        model.denoise.forward = forward  # type: ignore[method-assign]


def canvas(lm: LanguageModel, holes: int, seed: int) -> list[int]:
    text = "abc defgh "[: 1 + seed % 9]
    return [*lm.tokenizer.encode(text), *[lm.vocab.mask] * holes, *lm.tokenizer.encode("fed")]  # type: ignore[union-attr]
