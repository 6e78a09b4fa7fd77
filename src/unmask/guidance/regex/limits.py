"""What a pattern may cost: work that is counted as it is done, and results that are kept up to some bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WorkBudget:
    """Counts what is done for a pattern, and refuses to do more than `most`: on any machine the same."""

    def __init__(self, pattern: str, max_work: int) -> None:
        self.pattern, self.remaining = pattern, max_work

    def spend(self, amount: int) -> None:
        """So much is about to be done."""
        self.remaining -= amount
        if self.remaining < 0:
            raise self.limit_error()

    def limit_error(self) -> ValueError:
        """What to tell of a pattern that asks for too much."""
        return ValueError(
            f"the pattern {self.pattern[:60]!r} takes too much time or memory; repeat smaller parts, or less"
            " often, or match shorter holes"
        )


class LRUCache(Generic[_T]):
    """The results that were used last, as many as have `most` bytes in all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[_T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> _T | None:
        """What was put there, if it is still kept."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: _T, num_bytes: int) -> None:
        """Keep a value of so many bytes, and give up what has not been used for longest."""
        with self._lock:
            self.used_bytes += num_bytes - self._entries.pop(key, (value, 0))[1]
            self._entries[key] = value, num_bytes
            while self.used_bytes > self.max_bytes:
                self.used_bytes -= self._entries.popitem(last=False)[1][1]
