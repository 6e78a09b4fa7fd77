"""The engine: one thread owns the model and runs all sequences, batched step by step.

Between two forward passes new sequences join the batch, and finished, cancelled and expired ones leave it.
Requests get fair shares (see `scheduler`). An iteration that takes too long is logged, and neither deadlines
(which the server's event loop checks too) nor shutdown depend on its end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.hardware.memory import is_out_of_memory
from unmask.serve._metrics import EngineMetrics
from unmask.serve._prefix_store import PrefixStore
from unmask.serve._scheduler import RunningTask, ScheduledRequest, fair_order, next_to_start
from unmask.serve._step_batching import ForwardCall, SamplerCoroutine, run_batch, select_batch
from unmask.types import Vocab

EventFn = Callable[[Any], None]
Job = Callable[[DenoiserLike, EventFn], Any]

SHUTDOWN_GRACE_SECONDS = 2.0
"""Seconds for the last iteration after `close` has given up waiting."""
_COMPUTE_SLICE_SECONDS = 0.01
"""Seconds per iteration for sequences with long computations of their own, such as regex constraints."""
_MAX_CACHED_BATCHES = 4
"""The limit on running sequences with a KV cache, in multiples of the batch size."""


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
    """An error of the server that clients get no details of."""


@dataclass(eq=False)
class Task:
    """One sequence to generate or score.

    `job(denoiser, emit)` returns the result and may emit events. `on_progress` gets the events, and `on_done`
    the result or the exception; both are called in the engine's thread, and must be quick. `deadline` is a
    time of `time.monotonic`.
    """

    job: Job
    on_done: EventFn
    on_progress: EventFn = lambda _: None
    deadline: float = float("inf")
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


class EngineModel(Protocol):
    """What the engine asks of a model: a language model, or a classifier in its place."""

    @property
    def vocab(self) -> Vocab:
        """The token ids."""
        ...

    @property
    def predictor(self) -> DenoiserLike:
        """What jobs call."""
        ...

    def inference_mode(self) -> AbstractContextManager[None]:
        """No gradients and no dropout."""
        ...


class Engine:
    """Runs at most `max_batch` sequences per forward pass, with `max_queue` more waiting.

    The model is loaded in the engine's thread too: once a second thread has used torch, OpenMP has more
    threads than cores and puts them to sleep between operations, which doubles the time. `on_ready` or
    `on_failure` is called after loading. An iteration of more than `stuck_after` seconds counts as stuck. Up to
    `prefix_bytes` of what is cached of prompts are kept for later requests; 0: nothing.
    """

    model: EngineModel

    def __init__(
        self,
        load: Callable[[], EngineModel],
        metrics: EngineMetrics,
        max_batch: int = 32,
        max_queue: int = 256,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
        stuck_after: float = 60.0,
        prefix_bytes: int = 0,
    ) -> None:
        self.metrics, self.max_batch, self.max_pending, self.stuck_after = (
            metrics,
            max_batch,
            max_batch + max_queue,
            stuck_after,
        )
        self._prefixes = PrefixStore(prefix_bytes, metrics) if prefix_bytes else None
        self._load, self._on_ready, self._on_failure = load, on_ready, on_failure
        self.ready = False
        self._requests: list[ScheduledRequest] = []
        self._condition = threading.Condition()
        self._closing = self._abandoned = False
        self._finish_times: deque[float] = deque(maxlen=64)
        self._iterations = self._submitted = 0
        self._iteration_started: float | None = None
        self._slice_deadline = self._forward_seconds = 0.0
        self._stopped = threading.Event()
        metrics.iteration_seconds.set_function(lambda: self.iteration_seconds)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_for_stall, name="watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def iteration_seconds(self) -> float:
        """The duration of the current iteration so far; 0 while idle."""
        start = self._iteration_started
        return 0.0 if start is None else time.monotonic() - start

    @property
    def stuck(self) -> bool:
        """Whether the current iteration takes so long that it may never end."""
        return self.alive and self.iteration_seconds > self.stuck_after

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue the tasks of one request: all of them, or none and QueueFullError."""
        with self._condition:
            if self._closing:
                raise EngineClosedError("the server is stopping")
            pending = sum(len(request.waiting) + len(request.running) for request in self._requests)
            if pending + len(tasks) > self.max_pending:
                raise QueueFullError(self._retry_after(pending))
            self._submitted += 1
            self._requests.append(ScheduledRequest(deque(tasks), self._submitted, last_iteration=self._iterations))
            self._update_gauges()
            self._condition.notify()

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Drop these tasks before the next forward pass, without calling `on_done`."""
        for task in tasks:
            task.cancelled.set()
        with self._condition:
            self._condition.notify()

    def close(self, shutdown_timeout: float = 0.0) -> bool:
        """Accept nothing new, finish running tasks for at most `shutdown_timeout` seconds, then stop.

        Remaining tasks fail with EngineClosedError, even if the thread is stuck. Returns whether the thread
        has ended.
        """
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
                "the engine has been in one iteration for %.0f seconds, and is abandoned", self.iteration_seconds
            )
            self._fail_pending()
        return not self.alive

    def _watch_for_stall(self) -> None:
        """Log when an iteration is stuck, and when it ends."""
        log, was_stuck = logging.getLogger(__name__), False
        while not self._stopped.wait(min(1.0, self.stuck_after / 4)):
            if self.stuck and not was_stuck:
                self.metrics.stuck_iterations.inc()
                log.error("the engine has been in one iteration for %.0f seconds: stuck?", self.iteration_seconds)
            elif was_stuck and not self.stuck:
                log.warning("the engine continues")
            was_stuck = self.stuck

    def _retry_after(self, pending: int) -> int:
        """The estimated seconds until the pending tasks are finished."""
        if len(self._finish_times) < 2:
            return 1
        seconds_per_task = (time.monotonic() - self._finish_times[0]) / len(self._finish_times)
        return max(1, min(60, round(seconds_per_task * pending)))

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
        """Fail all tasks that are not finished."""
        with self._condition:
            self._closing = True
            unfinished = [
                task
                for request in self._requests
                for task in [*(running.task for running in request.running), *request.waiting]
            ]
        for task in unfinished:
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
        """Wait for tasks and start an iteration; False if the engine shall stop."""
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
        """Drop waiting tasks that are cancelled or expired, and start others."""
        with self._condition:
            dropped = []
            for request in self._requests:
                expired = [task for task in request.waiting if _is_expired(task)]
                if expired:
                    request.waiting = deque(task for task in request.waiting if task not in expired)
                    dropped += expired
        for task in dropped:
            self._finish(task, DeadlineError("the deadline has passed"))
        self._slice_deadline = time.monotonic() + _COMPUTE_SLICE_SECONDS
        while (starting := self._next_to_start()) is not None:
            self._start(starting)
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

        running = RunningTask(
            task, SamplerCoroutine(run_job, self.model.predictor, self._prefixes), request, self._iterations
        )
        request.running.append(running)
        self._advance(running, running.coroutine.start)

    def _drop_expired(self) -> None:
        """Drop running tasks that are cancelled or expired."""
        for running in [running for request in self._requests for running in request.running]:
            if _is_expired(running.task):
                self._fail(running, DeadlineError("the deadline has passed"))

    def _run_batch(self) -> None:
        """One forward pass for as many sequences as fit."""
        self._forward_seconds = 0.0
        order = fair_order(self._requests, self._iterations)
        if not order:
            return
        pending = [_pending_call(running) for running in order]
        batch = [order[index] for index in select_batch(pending, self.max_batch, self.model.vocab.size)]
        calls = [_pending_call(running) for running in batch]
        start = time.perf_counter()
        outputs = self._outputs(calls)
        if not outputs:
            return
        self._forward_seconds = time.perf_counter() - start
        self.metrics.observe_forward(sum(len(call.z) for call in calls), self._forward_seconds)
        self._slice_deadline = time.monotonic() + _COMPUTE_SLICE_SECONDS
        for running, call, output in zip(batch, calls, outputs, strict=True):
            running.last_iteration = running.request.last_iteration = self._iterations
            running.request.processed_tokens += call.z.numel()
            if isinstance(output, Exception):
                self._fail(running, _public_error(output))
            else:
                self._advance(running, partial(running.coroutine.send, output))

    def _outputs(self, calls: Sequence[ForwardCall]) -> Sequence[Tensor | Exception]:
        """The outputs of calls, or what failed; none if memory did not suffice for all of them at once.

        If a batch fails, each call is repeated alone: the error of one must not be that of the others.
        """
        try:
            return run_batch(self.model.predictor, calls)
        except Exception as error:  # no error may end the thread
            if len(calls) == 1:
                return [error]
            if is_out_of_memory(error):
                self.max_batch = max(1, len(calls) // 2)  # permanently: it would happen again
                return []
        return [output for call in calls for output in self._outputs([call])]

    def _resume_paused(self) -> None:
        """Resume paused sequences for a time slice, in turns: one that computes for long does not hold others up."""
        running = [running for request in self._requests for running in request.running]
        paused = sorted((each for each in running if each.coroutine.paused), key=lambda each: each.last_iteration)
        self._slice_deadline = time.monotonic() + self._compute_slice(len(paused), len(running))
        for number, each in enumerate(paused):
            if number and time.monotonic() >= self._slice_deadline:
                break
            each.last_iteration = self._iterations
            self._advance(each, each.coroutine.resume)

    def _compute_slice(self, num_paused: int, num_running: int) -> float:
        """Seconds for paused sequences: their share of the iteration's forward pass, in which they had none."""
        return max(_COMPUTE_SLICE_SECONDS, self._forward_seconds * num_paused / max(1, num_running))

    def _advance(self, running: RunningTask, resume: Callable[[], None]) -> None:
        # The rest of the iteration's time slice, but not less than a useful minimum.
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
        """Report the result, once: an abandoned thread may still finish the task."""
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
    """The error for the client; details of unexpected errors go to the log only."""
    if is_out_of_memory(error):
        return MemoryError("out of memory for a single sequence: request fewer tokens")
    if isinstance(error, ValueError):
        return error
    logging.getLogger(__name__).error("a sequence failed", exc_info=error)
    return InternalError("internal error; the server's log has the details")


def _is_expired(task: Task) -> bool:
    return task.cancelled.is_set() or time.monotonic() >= task.deadline
