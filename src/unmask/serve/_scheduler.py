"""Fair scheduling: which sequences are in the next forward pass, whatever the size of the requests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.serve._engine import Task
    from unmask.serve._step_batching import SamplerCoroutine


@dataclass(eq=False)
class ScheduledRequest:
    """The sequences of one request: waiting and running."""

    waiting: deque[Task]
    arrival: int
    running: list[RunningTask] = field(default_factory=list)
    last_iteration: int = 0
    """The iteration of its last forward pass."""
    processed_tokens: int = 0
    """Tokens in all its forward passes."""

    @property
    def finished(self) -> bool:
        """Whether all sequences are finished."""
        return not self.waiting and not self.running


@dataclass(eq=False)
class RunningTask:
    """A sequence that has been started."""

    task: Task
    coroutine: SamplerCoroutine
    request: ScheduledRequest
    last_iteration: int = 0
    """The iteration of its last forward pass, or in which it was resumed last."""


def next_to_start(requests: Sequence[ScheduledRequest], max_batch: int) -> ScheduledRequest | None:
    """The request whose next sequence is started; None if none may be.

    Every request has at least one running sequence. Beyond that, the request with the fewest comes first, up
    to `max_batch` in all.
    """
    waiting = [request for request in requests if request.waiting]
    if not waiting:
        return None
    fewest = min(waiting, key=lambda request: (len(request.running), request.arrival))
    num_running = sum(len(request.running) for request in requests)
    return fewest if not fewest.running or num_running < max_batch else None


def fair_order(requests: Sequence[ScheduledRequest], iteration: int) -> list[RunningTask]:
    """The sequences that wait for a forward pass, in order of priority.

    The first sequence of each request comes before the second one of any. Among these, the request that has
    waited longest and the request with the fewest processed tokens alternate: the former prevents starvation,
    the latter finishes short requests soon. Which of the two comes first alternates between iterations,
    because sequences that cannot be batched with the first one have to wait.
    """
    ranked: list[tuple[int, RunningTask]] = []
    for request in requests:
        pending = [task for task in request.running if task.coroutine.pending_call is not None]
        ranked += enumerate(sorted(pending, key=lambda task: task.last_iteration))
    longest_waiting = sorted(
        ranked, key=lambda pair: (pair[0], pair[1].request.last_iteration, pair[1].request.arrival)
    )
    least_served = sorted(ranked, key=lambda pair: (pair[0], pair[1].request.processed_tokens, pair[1].request.arrival))
    orders = (longest_waiting, least_served) if iteration % 2 == 0 else (least_served, longest_waiting)
    merged = itertools.chain.from_iterable(zip(*orders, strict=True))
    return list(dict.fromkeys(task for _, task in merged))
