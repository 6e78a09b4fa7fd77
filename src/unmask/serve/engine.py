"""The engine: one thread owns the model, and everybody's rows pass through it step by step.

Between two calls of the network new rows join, and rows that are finished, given up or late leave. Requests
have fair shares of the calls (`fairness`). A turn that takes too long is noticed and told, and nothing that
others wait for depends on its end: neither deadlines, which the server's own loop keeps as well, nor closing.
"""

from __future__ import annotations

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
from unmask.serve.fairness import Request, Running, in_turn, next_to_begin
from unmask.serve.metrics import Metrics
from unmask.training.machine import is_out_of_memory

Tell = Callable[[Any], None]
Work = Callable[[Denoise, Tell], Any]

GRACE = 2.0
"""Seconds that a closing engine's thread has to end its turn."""
SLICE = 0.01
"""Seconds of a turn that go to rows which compute by themselves for longer, such as those with patterns."""
CACHES = 4
"""Rows with a cache of their own that may have begun, in multiples of the rows of a call."""


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
    ended: bool = False


class Engine:
    """At most `rows` texts share a call; besides as many, `queue` more may be there, of which each request
    has begun one at least.

    The model is loaded by the engine's thread as well: where a second thread has ever computed with torch,
    the threads of both are more than the cores, and OpenMP puts them to sleep between any two operations,
    which takes twice as long. `on_ready` or `on_failure` is called once that is over. A turn of more than
    `stuck_after` seconds is stuck.
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
        stuck_after: float = 60.0,
    ) -> None:
        self.metrics, self.rows, self.most, self.stuck_after = metrics, rows, rows + queue, stuck_after
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self.ready = False
        self._requests: list[Request] = []
        self._change = threading.Condition()
        self._closing = self._abandoned = False
        self._finished: deque[float] = deque(maxlen=64)
        self._turns = self._submitted = 0
        self._turn_began: float | None = None
        self._slice_ends = 0.0
        self._stopped = threading.Event()
        metrics.turn.set_function(lambda: self.turn_seconds)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it still works."""
        return self._thread.is_alive()

    @property
    def turn_seconds(self) -> float:
        """How long the present turn has taken so far; 0 where nothing is being done."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stuck(self) -> bool:
        """Whether the present turn takes so long that it may never end."""
        return self.alive and self.turn_seconds > self.stuck_after

    def submit(self, tasks: Sequence[Task]) -> None:
        """All of the tasks, which are one request, or none of them and BusyError."""
        with self._change:
            if self._closing:
                raise ClosedError("the server is stopping")
            there = sum(len(request.waiting) + len(request.running) for request in self._requests)
            if there + len(tasks) > self.most:
                raise BusyError(self._retry_after(there))
            self._submitted += 1
            self._requests.append(Request(deque(tasks), self._submitted, last=self._turns))
            self._count()
            self._change.notify()

    def give_up(self, tasks: Sequence[Task]) -> None:
        """Nobody wants these any more: they leave before the next call, and are told nothing."""
        for task in tasks:
            task.given_up.set()
        with self._change:
            self._change.notify()

    def close(self, patience: float = 0.0) -> bool:
        """Take nothing new, finish what there is for at most `patience` seconds, then stop; whether the
        thread has ended. Who still waits is told, even where the thread is stuck and cannot end."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(patience)
        with self._change:
            self._abandoned = True
            self._change.notify()
        self._thread.join(GRACE)
        self._stopped.set()
        if self.alive:
            logging.getLogger(__name__).error(
                "the engine has been in one turn for %.0f seconds, and is left behind", self.turn_seconds
            )
            self._dismiss()
        return not self.alive

    def _watch(self) -> None:
        """Tell the log of a turn that is stuck, and of its end."""
        log, noticed = logging.getLogger(__name__), False
        while not self._stopped.wait(min(1.0, self.stuck_after / 4)):
            if self.stuck and not noticed:
                self.metrics.stuck.inc()
                log.error("the engine has been in one turn for %.0f seconds: stuck?", self.turn_seconds)
            elif noticed and not self.stuck:
                log.warning("the engine goes on")
            noticed = self.stuck

    def _retry_after(self, there: int) -> int:
        """About when as many will have ended as there are."""
        if len(self._finished) < 2:
            return 1
        pace = (time.monotonic() - self._finished[0]) / len(self._finished)
        return max(1, min(60, round(pace * there)))

    def _count(self) -> None:
        self.metrics.queue.set(sum(len(request.waiting) for request in self._requests))
        self.metrics.running.set(sum(len(request.running) for request in self._requests))

    def _run(self) -> None:
        try:
            self.model = self._load()
        except Exception as error:
            self._on_failure(error)
        else:
            self.ready = True
            self._on_ready()
            self._serve()
        self._turn_began = None
        self._stopped.set()
        self._dismiss()

    def _dismiss(self) -> None:
        """Tell everybody who still waits that nothing will come."""
        with self._change:
            self._closing = True
            left = [
                task
                for request in self._requests
                for task in [*(row.task for row in request.running), *request.waiting]
            ]
        for task in left:
            self._end(task, ClosedError("the server is stopping"))

    def _serve(self) -> None:
        with self.model.inference():
            while self._wait():
                self._admit()
                self._sort_out()
                self._turn()
                self._go_on()
                with self._change:
                    self._requests = [request for request in self._requests if not request.over]
                    self._count()

    def _wait(self) -> bool:
        """Wait for work, whose turn then begins; whether to go on."""
        self._turn_began = None
        with self._change:
            while not (self._requests or self._closing):
                self._change.wait()
            if self._abandoned or not self._requests:
                return False
        self._turns += 1
        self._turn_began = time.monotonic()
        return True

    def _admit(self) -> None:
        """Let rows begin; who waits may be late or gone as well."""
        with self._change:
            gone = []
            for request in self._requests:
                over = [task for task in request.waiting if _is_over(task)]
                if over:
                    request.waiting = deque(task for task in request.waiting if task not in over)
                    gone += over
        for task in gone:
            self._end(task, LateError("the deadline has passed"))
        self._slice_ends = time.monotonic() + SLICE
        while (following := self._next_to_begin()) is not None:
            self._begin(following)
        with self._change:
            self._count()

    def _next_to_begin(self) -> Request | None:
        with self._change:
            requests = list(self._requests)
        cached = sum(
            bool(row.conversation.question and row.conversation.question.context)
            for request in requests
            for row in request.running
        )
        return next_to_begin(requests, self.rows) if cached < CACHES * self.rows else None

    def _begin(self, request: Request) -> None:
        with self._change:
            task = request.waiting.popleft()

        def work(denoise: Denoise) -> None:
            result = task.work(denoise, task.on_progress)
            self._end(task, result)

        running = Running(task, Conversation(work, self.model.denoise), request, self._turns)
        request.running.append(running)
        self._step(running, running.conversation.begin)

    def _sort_out(self) -> None:
        """Rows that nobody waits for, or not any more, leave."""
        for running in [row for request in self._requests for row in request.running]:
            if _is_over(running.task):
                self._fail(running, LateError("the deadline has passed"))

    def _turn(self) -> None:
        """One call of the network, for as many as it can serve."""
        order = in_turn(self._requests, self._turns)
        if not order:
            return
        questions = [_question(running) for running in order]
        served = [order[place] for place in together(questions, self.rows, self.model.vocab.size)]
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
        self._slice_ends = time.monotonic() + SLICE
        for running, question, answer in zip(served, asked, answers, strict=True):
            running.asked_at = running.request.last = self._turns
            running.request.served += question.z.numel()
            self._step(running, lambda running=running, answer=answer: running.conversation.answer(answer))  # type: ignore[misc]

    def _go_on(self) -> None:
        """The row that has paused longest computes on for a while."""
        paused = [row for request in self._requests for row in request.running if row.conversation.paused]
        if paused:
            first = min(paused, key=lambda row: row.asked_at)
            self._slice_ends = time.monotonic() + SLICE
            self._step(first, first.conversation.go_on)

    def _step(self, running: Running, advance: Callable[[], None]) -> None:
        # What is left of the turn's slice for those that compute for long, or as little as makes sense.
        running.conversation.until = max(self._slice_ends, time.monotonic() + SLICE / 8)
        try:
            advance()
        except Exception as error:
            running.conversation.question = None
            self._end(running.task, _as_told(error))
        if running.conversation.over:
            running.request.running.remove(running)

    def _fail(self, running: Running, error: Exception) -> None:
        running.request.running.remove(running)
        running.conversation.leave()
        self._end(running.task, error)

    def _end(self, task: Task, result: Any) -> None:
        """Tell the result, once: a thread that was left behind may still come to its end."""
        with self._change:
            if task.ended:
                return
            task.ended = True
            self._finished.append(time.monotonic())
        if not task.given_up.is_set():
            task.on_done(result)


def _question(running: Running) -> Question:
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
