"""The engine: one thread owns the model, and everybody's rows pass through it step by step.

Between two calls of the network new rows join, and rows that are finished, given up or late leave. What has
waited longest is always in the next call, so nobody starves.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unmask.diffusion.denoise import Denoise
from unmask.model import LanguageModel
from unmask.serve.batching import Conversation, Question, ask, together
from unmask.serve.metrics import Metrics
from unmask.training.machine import is_out_of_memory

Tell = Callable[[Any], None]
Work = Callable[[Denoise, Tell], Any]


class BusyError(Exception):
    """The queue is full; `retry_after` seconds from now there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy: try again in {retry_after} seconds")
        self.retry_after = retry_after


class LateError(Exception):
    """The deadline has passed."""


class ClosedError(Exception):
    """The engine has stopped."""


class InternalError(Exception):
    """Something broke that is nobody's fault but the server's."""


@dataclass(eq=False)
class Task:
    """Something to do with the network.

    `work(denoise, tell)` may tell of its progress. `on_progress`, and in the end `on_done` with the result
    or the exception, are called in the engine's thread, and must be quick. `deadline` is a time of
    `time.monotonic`.
    """

    work: Work
    on_done: Tell
    on_progress: Tell = lambda _: None
    deadline: float = float("inf")
    given_up: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Running:
    task: Task
    conversation: Conversation
    asked_at: int = 0


class Engine:
    """Tasks wait in a queue of at most `queue`; of those that run, at most `rows` share a call.

    The model is loaded by the engine's thread as well: where a second thread has ever computed with torch,
    the threads of both are more than the cores, and OpenMP puts them to sleep between any two operations,
    which takes twice as long. `on_ready` or `on_failure` is called once that is over.
    """

    model: LanguageModel

    def __init__(
        self,
        load: Callable[[], LanguageModel],
        metrics: Metrics,
        rows: int = 32,
        queue: int = 256,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.metrics, self.rows, self.queue = metrics, rows, queue
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self.ready = False
        self._waiting: deque[Task] = deque()
        self._running: list[_Running] = []
        self._change = threading.Condition()
        self._closing = self._abandoned = False
        self._finished: deque[float] = deque(maxlen=64)
        self._turns = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still works."""
        return self._thread.is_alive()

    def submit(self, tasks: Sequence[Task]) -> None:
        """All of the tasks, or none of them and BusyError."""
        with self._change:
            if self._closing:
                raise ClosedError("the server is stopping")
            if len(self._waiting) + len(tasks) > self.queue:
                raise BusyError(self._retry_after())
            self._waiting.extend(tasks)
            self.metrics.queue.set(len(self._waiting))
            self._change.notify()

    def give_up(self, tasks: Sequence[Task]) -> None:
        """Nobody wants these any more: they leave before the next call, and are told nothing."""
        for task in tasks:
            task.given_up.set()
        with self._change:
            self._change.notify()

    def close(self, patience: float = 0.0) -> None:
        """Take nothing new, finish what there is for at most `patience` seconds, then stop."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(patience)
        with self._change:
            self._abandoned = True
            self._change.notify()
        self._thread.join()

    def _retry_after(self) -> int:
        """About when the queue will have moved by what it holds."""
        if len(self._finished) < 2:
            return 1
        pace = (time.monotonic() - self._finished[0]) / len(self._finished)
        return max(1, min(60, round(pace * len(self._waiting))))

    def _run(self) -> None:
        try:
            self.model = self._load()
        except Exception as error:
            self._on_failure(error)
        else:
            self.ready = True
            self._on_ready()
            self._serve()
        with self._change:
            self._closing = True
        for task in [*(running.task for running in self._running), *self._waiting]:
            task.on_done(ClosedError("the server is stopping"))

    def _serve(self) -> None:
        with self.model.inference():
            while self._admit():
                self._sort_out()
                if self._running:
                    self._turn()
                self.metrics.running.set(len(self._running))

    def _admit(self) -> bool:
        """Wait for work and let it begin; whether to go on."""
        with self._change:
            while not (self._waiting or self._running or self._closing):
                self._change.wait()
            if self._abandoned or (self._closing and not self._waiting and not self._running):
                return False
            free = self.rows - len(self._running)
            joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            # Who waits in the queue may be late or gone as well.
            gone = [task for task in self._waiting if _is_over(task)]
            for task in gone:
                self._waiting.remove(task)
            self.metrics.queue.set(len(self._waiting))
        for task in gone:
            self._end(task, LateError("the deadline has passed"))
        for task in joining:
            if _is_over(task):
                self._end(task, LateError("the deadline has passed"))
            else:
                self._begin(task)
        return True

    def _begin(self, task: Task) -> None:
        def work(denoise: Denoise) -> None:
            result = task.work(denoise, task.on_progress)
            self._end(task, result)

        running = _Running(task, Conversation(work, self.model.denoise), next(self._turns))
        self._step(running, running.conversation.begin)
        if running.conversation.question is not None:
            self._running.append(running)

    def _sort_out(self) -> None:
        """Rows that nobody waits for, or not any more, leave."""
        for running in [running for running in self._running if _is_over(running.task)]:
            self._running.remove(running)
            running.conversation.leave()
            self._end(running.task, LateError("the deadline has passed"))

    def _turn(self) -> None:
        """One call of the network, for as many as it can serve."""
        order = sorted(self._running, key=lambda running: running.asked_at)
        questions = [_question(running) for running in order]
        vocab = self.model.vocab.size
        served = [order[place] for place in together(questions, self.rows, vocab)]
        asked = [_question(running) for running in served]
        start = time.perf_counter()
        try:
            answers = ask(self.model.denoise, asked)
        except Exception as error:  # whatever it is, it must not end the thread
            if is_out_of_memory(error) and len(served) > 1:
                self.rows = max(1, len(served) // 2)  # for good: the same would happen again
                return
            for running in served:
                self._fail(running, _as_told(error))
            return
        self.metrics.call(sum(len(question.z) for question in asked), time.perf_counter() - start)
        for running, answer in zip(served, answers, strict=True):
            running.asked_at = next(self._turns)
            self._step(running, lambda running=running, answer=answer: running.conversation.answer(answer))  # type: ignore[misc]
            if running.conversation.question is None and running in self._running:
                self._running.remove(running)

    def _step(self, running: _Running, advance: Callable[[], None]) -> None:
        try:
            advance()
        except Exception as error:
            running.conversation.question = None
            self._end(running.task, _as_told(error))

    def _fail(self, running: _Running, error: Exception) -> None:
        self._running.remove(running)
        running.conversation.leave()
        self._end(running.task, error)

    def _end(self, task: Task, result: Any) -> None:
        self._finished.append(time.monotonic())
        if not task.given_up.is_set():
            task.on_done(result)


def _question(running: _Running) -> Question:
    assert running.conversation.question is not None
    return running.conversation.question


def _as_told(error: Exception) -> Exception:
    """What a client may know of an error; the rest goes to the log."""
    if is_out_of_memory(error):
        return MemoryError("memory ran out for a single text: ask for fewer tokens")
    if isinstance(error, ValueError):
        return error
    logging.getLogger(__name__).error("a row failed", exc_info=error)
    return InternalError("something went wrong in the server")


def _is_over(task: Task) -> bool:
    return task.given_up.is_set() or time.monotonic() >= task.deadline
