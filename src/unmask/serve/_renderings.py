"""Conversations become text one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from unmask.serve._engine import DeadlineError, QueueFullError

_MAX_RENDERING = 64
"""Conversations that may wait for the process that renders templates."""

_T = TypeVar("_T")


class Renderings:
    """Conversations are rendered one after another, in a thread: a slow template takes none that others need."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def run(self, render: Callable[[], _T], deadline: float) -> _T:
        """The result of a function that renders a conversation."""
        if self._waiting >= _MAX_RENDERING:
            raise QueueFullError(retry_after=5)
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._lock:
                return await asyncio.to_thread(render)
        except TimeoutError:
            raise DeadlineError("the deadline has passed while the conversation was being rendered") from None
        finally:
            self._waiting -= 1
