"""Who is in the next call: fair shares among requests, whatever the number and the length of their rows."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unmask.serve.batching import Conversation
    from unmask.serve.engine import Task


@dataclass(eq=False)
class Request:
    """Rows that were submitted together: those that wait to begin and those that have begun."""

    waiting: deque[Task]
    arrived: int
    running: list[Running] = field(default_factory=list)
    last: int = 0
    """The turn in which it was last in a call."""
    served: int = 0
    """Tokens that the network has read for it."""

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return not self.waiting and not self.running


@dataclass(eq=False)
class Running:
    """A row that has begun."""

    task: Task
    conversation: Conversation
    request: Request
    asked_at: int = 0
    """The turn in which it was last in a call."""


def next_to_begin(requests: Sequence[Request], rows: int) -> Request | None:
    """Whose next row begins: every request has one, however many rows others have; beyond that, who has the
    fewest, up to `rows` in all."""
    waiting = [request for request in requests if request.waiting]
    if not waiting:
        return None
    fewest = min(waiting, key=lambda request: (len(request.running), request.arrived))
    begun = sum(len(request.running) for request in requests)
    return fewest if not fewest.running or begun < rows else None


def in_turn(requests: Sequence[Request], turn: int) -> list[Running]:
    """The rows that could be asked for, first those that should be.

    One row of each request comes before a second one of any. Of these, every other place is for the request
    that has waited longest, so that nobody starves, and every other for the one that has had the least, so
    that what is short is soon over however many long ones there are. Who comes first alternates as well,
    because rows of another kind than the first one's cannot share its call.
    """
    ranked: list[tuple[int, Running]] = []
    for request in requests:
        asking = [row for row in request.running if row.conversation.question is not None]
        ranked += enumerate(sorted(asking, key=lambda row: row.asked_at))
    patient = sorted(ranked, key=lambda pair: (pair[0], pair[1].request.last, pair[1].request.arrived))
    small = sorted(ranked, key=lambda pair: (pair[0], pair[1].request.served, pair[1].request.arrived))
    both = (patient, small) if turn % 2 == 0 else (small, patient)
    merged = itertools.chain.from_iterable(zip(*both, strict=True))
    return list(dict.fromkeys(row for _, row in merged))
