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

from unmask.diffusion.denoiser import DenoiserLike
from unmask.hardware.memory import is_out_of_memory
from unmask.model import LanguageModel
from unmask.serve.metrics import Metrics
from unmask.serve.scheduler import RunningTask, ScheduledRequest, fair_order, next_to_start
from unmask.serve.step_batching import ForwardCall, SamplerCoroutine, run_batch, select_batch

EventFn = Callable[[Any], None]
Job = Callable[[DenoiserLike, EventFn], Any]

SHUTDOWN_GRACE_SECONDS = 2.0
"""Seconds that a closing engine's thread has to end its turn."""
_COMPUTE_SLICE_SECONDS = 0.01
"""Seconds of a turn that go to rows which compute by themselves for longer, such as those with patterns."""
_MAX_CACHED_BATCHES = 4
"""Rows with a cache of their own that may have begun, in multiples of the rows of a call."""


class QueueFullError(Exception):
    """The queue is full; `retry_after` seconds from now there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy: try again in {retry_after} seconds")
        self.retry_after = retry_after


class DeadlineError(Exception):
    """The deadline has passed."""


class EngineClosedError(Exception):
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

    job: Job
    on_done: EventFn
    on_progress: EventFn = lambda _: None
    deadline: float = float("inf")
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


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
        max_batch: int = 32,
        max_queue: int = 256,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
        stuck_after: float = 60.0,
    ) -> None:
        self.metrics, self.max_batch, self.max_pending, self.stuck_after = (
            metrics,
            max_batch,
            max_batch + max_queue,
            stuck_after,
        )
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self.ready = False
        self._requests: list[ScheduledRequest] = []
        self._condition = threading.Condition()
        self._closing = self._abandoned = False
        self._finish_times: deque[float] = deque(maxlen=64)
        self._iterations = self._submitted = 0
        self._iteration_started: float | None = None
        self._slice_deadline = 0.0
        self._stopped = threading.Event()
        metrics.iteration_seconds.set_function(lambda: self.iteration_seconds)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_for_stall, name="watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it still works."""
        return self._thread.is_alive()

    @property
    def iteration_seconds(self) -> float:
        """How long the present turn has taken so far; 0 where nothing is being done."""
        began = self._iteration_started
        return 0.0 if began is None else time.monotonic() - began

    @property
    def stuck(self) -> bool:
        """Whether the present turn takes so long that it may never end."""
        return self.alive and self.iteration_seconds > self.stuck_after

    def submit(self, tasks: Sequence[Task]) -> None:
        """All of the tasks, which are one request, or none of them and BusyError."""
        with self._condition:
            if self._closing:
                raise EngineClosedError("the server is stopping")
            there = sum(len(request.waiting) + len(request.running) for request in self._requests)
            if there + len(tasks) > self.max_pending:
                raise QueueFullError(self._retry_after(there))
            self._submitted += 1
            self._requests.append(ScheduledRequest(deque(tasks), self._submitted, last_iteration=self._iterations))
            self._update_gauges()
            self._condition.notify()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Nobody wants these any more: they leave before the next call, and are told nothing."""
        for task in tasks:
            task.cancelled.set()
        with self._condition:
            self._condition.notify()

    def close(self, shutdown_timeout: float = 0.0) -> bool:
        """Take nothing new, finish what there is for at most `patience` seconds, then stop; whether the
        thread has ended. Who still waits is told, even where the thread is stuck and cannot end."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(shutdown_timeout)
        with self._condition:
            self._abandoned = True
            self._condition.notify()
        self._thread.join(SHUTDOWN_GRACE_SECONDS)
        self._stopped.set()
        if self.alive:
            logging.getLogger(__name__).error(
                "the engine has been in one turn for %.0f seconds, and is left behind", self.iteration_seconds
            )
            self._fail_pending()
        return not self.alive

    def _watch_for_stall(self) -> None:
        """Tell the log of a turn that is stuck, and of its end."""
        log, noticed = logging.getLogger(__name__), False
        while not self._stopped.wait(min(1.0, self.stuck_after / 4)):
            if self.stuck and not noticed:
                self.metrics.stuck_iterations.inc()
                log.error("the engine has been in one turn for %.0f seconds: stuck?", self.iteration_seconds)
            elif noticed and not self.stuck:
                log.warning("the engine goes on")
            noticed = self.stuck

    def _retry_after(self, pending: int) -> int:
        """About when as many will have ended as there are."""
        if len(self._finish_times) < 2:
            return 1
        pace = (time.monotonic() - self._finish_times[0]) / len(self._finish_times)
        return max(1, min(60, round(pace * pending)))

    def _update_gauges(self) -> None:
        self.metrics.queued.set(sum(len(request.waiting) for request in self._requests))
        self.metrics.running.set(sum(len(request.running) for request in self._requests))

    def _run(self) -> None:
        try:
            self.model = self._load()
        except Exception as error:
            self._on_failure(error)
        else:
            self.ready = True
            self._on_ready()
            self._loop()
        self._iteration_started = None
        self._stopped.set()
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Tell everybody who still waits that nothing will come."""
        with self._condition:
            self._closing = True
            left = [
                task
                for request in self._requests
                for task in [*(row.task for row in request.running), *request.waiting]
            ]
        for task in left:
            self._finish(task, EngineClosedError("the server is stopping"))

    def _loop(self) -> None:
        with self.model.inference_mode():
            while self._wait_for_work():
                self._admit()
                self._drop_expired()
                self._run_batch()
                self._resume_paused()
                with self._condition:
                    self._requests = [request for request in self._requests if not request.finished]
                    self._update_gauges()

    def _wait_for_work(self) -> bool:
        """Wait for work, whose turn then begins; whether to go on."""
        self._iteration_started = None
        with self._condition:
            while not (self._requests or self._closing):
                self._condition.wait()
            if self._abandoned or not self._requests:
                return False
        self._iterations += 1
        self._iteration_started = time.monotonic()
        return True

    def _admit(self) -> None:
        """Let rows begin; who waits may be late or gone as well."""
        with self._condition:
            gone = []
            for request in self._requests:
                over = [task for task in request.waiting if _is_expired(task)]
                if over:
                    request.waiting = deque(task for task in request.waiting if task not in over)
                    gone += over
        for task in gone:
            self._finish(task, DeadlineError("the deadline has passed"))
        self._slice_deadline = time.monotonic() + _COMPUTE_SLICE_SECONDS
        while (following := self._next_to_start()) is not None:
            self._start(following)
        with self._condition:
            self._update_gauges()

    def _next_to_start(self) -> ScheduledRequest | None:
        with self._condition:
            requests = list(self._requests)
        cached = sum(
            row.coroutine.pending_call is not None and not row.coroutine.pending_call.context.is_empty
            for request in requests
            for row in request.running
        )
        return next_to_start(requests, self.max_batch) if cached < _MAX_CACHED_BATCHES * self.max_batch else None

    def _start(self, request: ScheduledRequest) -> None:
        with self._condition:
            task = request.waiting.popleft()

        def run_job(denoiser: DenoiserLike) -> None:
            result = task.job(denoiser, task.on_progress)
            self._finish(task, result)

        running = RunningTask(task, SamplerCoroutine(run_job, self.model.denoiser), request, self._iterations)
        request.running.append(running)
        self._advance(running, running.coroutine.start)

    def _drop_expired(self) -> None:
        """Rows that nobody waits for, or not any more, leave."""
        for running in [row for request in self._requests for row in request.running]:
            if _is_expired(running.task):
                self._fail(running, DeadlineError("the deadline has passed"))

    def _run_batch(self) -> None:
        """One call of the network, for as many as it can serve."""
        order = fair_order(self._requests, self._iterations)
        if not order:
            return
        questions = [_pending_call(running) for running in order]
        served = [order[place] for place in select_batch(questions, self.max_batch, self.model.vocab.size)]
        asked = [_pending_call(running) for running in served]
        start = time.perf_counter()
        try:
            answers = run_batch(self.model.denoiser, asked)
        except Exception as error:  # whatever it is, it must not end the thread
            if is_out_of_memory(error) and len(served) > 1:
                self.max_batch = max(1, len(served) // 2)  # for good: the same would happen again
                return
            for running in served:
                self._fail(running, _public_error(error))
            return
        self.metrics.observe_forward(sum(len(question.z) for question in asked), time.perf_counter() - start)
        self._slice_deadline = time.monotonic() + _COMPUTE_SLICE_SECONDS
        for running, question, answer in zip(served, asked, answers, strict=True):
            running.last_iteration = running.request.last_iteration = self._iterations
            running.request.processed_tokens += question.z.numel()
            self._advance(running, lambda running=running, answer=answer: running.coroutine.send(answer))  # type: ignore[misc]

    def _resume_paused(self) -> None:
        """The row that has paused longest computes on for a while."""
        paused = [row for request in self._requests for row in request.running if row.coroutine.paused]
        if paused:
            first = min(paused, key=lambda row: row.last_iteration)
            self._slice_deadline = time.monotonic() + _COMPUTE_SLICE_SECONDS
            self._advance(first, first.coroutine.resume)

    def _advance(self, running: RunningTask, resume: Callable[[], None]) -> None:
        # What is left of the turn's slice for those that compute for long, or as little as makes sense.
        running.coroutine.slice_deadline = max(self._slice_deadline, time.monotonic() + _COMPUTE_SLICE_SECONDS / 8)
        try:
            resume()
        except Exception as error:
            running.coroutine.pending_call = None
            self._finish(running.task, _public_error(error))
        if running.coroutine.finished:
            running.request.running.remove(running)

    def _fail(self, running: RunningTask, error: Exception) -> None:
        running.request.running.remove(running)
        running.coroutine.cancel()
        self._finish(running.task, error)

    def _finish(self, task: Task, result: Any) -> None:
        """Tell the result, once: a thread that was left behind may still come to its end."""
        with self._condition:
            if task.finished:
                return
            task.finished = True
            self._finish_times.append(time.monotonic())
        if not task.cancelled.is_set():
            task.on_done(result)


def _pending_call(running: RunningTask) -> ForwardCall:
    assert running.coroutine.pending_call is not None
    return running.coroutine.pending_call


def _public_error(error: Exception) -> Exception:
    """What a client may know of an error; the rest goes to the log."""
    if is_out_of_memory(error):
        return MemoryError("memory ran out for a single text: ask for fewer tokens")
    if isinstance(error, ValueError):
        return error
    logging.getLogger(__name__).error("a row failed", exc_info=error)
    return InternalError("something went wrong in the server")


def _is_expired(task: Task) -> bool:
    return task.cancelled.is_set() or time.monotonic() >= task.deadline
