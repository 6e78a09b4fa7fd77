"""Bounds on the cost of an expression: work budgets, caches of bounded size, and cooperative yields."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Generic, TypeVar

_T = TypeVar("_T")

YIELD_HOOK: ContextVar[Callable[[], None]] = ContextVar("YIELD_HOOK", default=lambda: None)
"""Called every few milliseconds of a long computation, so that a server can run other requests in between."""


def cooperative_yield() -> None:
    """Call `YIELD_HOOK`."""
    YIELD_HOOK.get()()


class WorkBudget:
    """Counts the work done for an expression; ValueError if it exceeds `max_work`, whatever the machine's speed.

    `subject` is what the message calls the expression.
    """

    def __init__(
        self, subject: str, max_work: int, advice: str = "use fewer or smaller repeats, or shorter holes"
    ) -> None:
        self.subject, self.remaining, self.advice = subject, max_work, advice

    def spend(self, amount: int) -> None:
        """Count work that is about to be done."""
        self.remaining -= amount
        if self.remaining < 0:
            raise self.limit_error()

    def limit_error(self) -> ValueError:
        """The error of an expression that exceeds its budget."""
        return ValueError(f"{self.subject} takes too much time or memory; {self.advice}")


class LRUCache(Generic[_T]):
    """The most recently used results, up to `max_bytes` in all; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[_T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> _T | None:
        """The cached value, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: _T, num_bytes: int) -> None:
        """Cache a value of this size, and evict the least recently used ones."""
        with self._lock:
            self.used_bytes += num_bytes - self._entries.pop(key, (value, 0))[1]
            self._entries[key] = value, num_bytes
            while self.used_bytes > self.max_bytes:
                self.used_bytes -= self._entries.popitem(last=False)[1][1]

    def get_or_build(self, key: Hashable, build: Callable[[], _T], size: Callable[[_T], int]) -> _T:
        """The cached value, or a new one, which is cached; two threads may build the same value at once."""
        value = self.get(key)
        if value is None:
            value = build()
            self.put(key, value, size(value))
        return value
