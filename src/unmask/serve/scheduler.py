"""Who is in the next call: fair shares among requests, whatever the number and the length of their rows."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.serve.engine import Task
    from unmask.serve.step_batching import SamplerCoroutine


@dataclass(eq=False)
class ScheduledRequest:
    """Rows that were submitted together: those that wait to begin and those that have begun."""

    waiting: deque[Task]
    arrival: int
    running: list[RunningTask] = field(default_factory=list)
    last_iteration: int = 0
    """The turn in which it was last in a call."""
    processed_tokens: int = 0
    """Tokens that the network has read for it."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do for it."""
        return not self.waiting and not self.running


@dataclass(eq=False)
class RunningTask:
    """A row that has begun."""

    task: Task
    coroutine: SamplerCoroutine
    request: ScheduledRequest
    last_iteration: int = 0
    """The turn in which it was last in a call."""


def next_to_start(requests: Sequence[ScheduledRequest], max_batch: int) -> ScheduledRequest | None:
    """Whose next row begins: every request has one, however many rows others have; beyond that, who has the
    fewest, up to `rows` in all."""
    waiting = [request for request in requests if request.waiting]
    if not waiting:
        return None
    fewest = min(waiting, key=lambda request: (len(request.running), request.arrival))
    begun = sum(len(request.running) for request in requests)
    return fewest if not fewest.running or begun < max_batch else None


def fair_order(requests: Sequence[ScheduledRequest], iteration: int) -> list[RunningTask]:
    """The rows that could be asked for, first those that should be.

    One row of each request comes before a second one of any. Of these, every other place is for the request
    that has waited longest, so that nobody starves, and every other for the one that has had the least, so
    that what is short is soon over however many long ones there are. Who comes first alternates as well,
    because rows of another kind than the first one's cannot share its call.
    """
    ranked: list[tuple[int, RunningTask]] = []
    for request in requests:
        asking = [row for row in request.running if row.coroutine.pending_call is not None]
        ranked += enumerate(sorted(asking, key=lambda row: row.last_iteration))
    patient = sorted(ranked, key=lambda pair: (pair[0], pair[1].request.last_iteration, pair[1].request.arrival))
    small = sorted(ranked, key=lambda pair: (pair[0], pair[1].request.processed_tokens, pair[1].request.arrival))
    both = (patient, small) if iteration % 2 == 0 else (small, patient)
    merged = itertools.chain.from_iterable(zip(*both, strict=True))
    return list(dict.fromkeys(row for _, row in merged))
