"""What a pattern may cost: work that is counted as it is done, and results that are kept up to some bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Work:
    """Counts what is done for a pattern, and refuses to do more than `most`: on any machine the same."""

    def __init__(self, pattern: str, most: int) -> None:
        self.pattern, self.left = pattern, most

    def spend(self, amount: int) -> None:
        """So much is about to be done."""
        self.left -= amount
        if self.left < 0:
            raise self.too_large()

    def too_large(self) -> ValueError:
        """What to tell of a pattern that asks for too much."""
        return ValueError(
            f"the pattern {self.pattern[:60]!r} takes too much time or memory; repeat smaller parts, or less"
            " often, or match shorter holes"
        )


class Kept(Generic[T]):
    """The results that were used last, as many as have `most` bytes in all."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._found: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        """What was put there, if it is still kept."""
        with self._lock:
            if key not in self._found:
                return None
            self._found.move_to_end(key)
            return self._found[key][0]

    def put(self, key: Hashable, value: T, size: int) -> None:
        """Keep a value of so many bytes, and give up what has not been used for longest."""
        with self._lock:
            self.bytes += size - self._found.pop(key, (value, 0))[1]
            self._found[key] = value, size
            while self.bytes > self.most:
                self.bytes -= self._found.popitem(last=False)[1][1]
