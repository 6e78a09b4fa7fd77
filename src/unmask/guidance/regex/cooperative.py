"""Long computations pause now and then, where somebody who runs them wants that."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

YIELD_HOOK: ContextVar[Callable[[], None]] = ContextVar("YIELD_HOOK", default=lambda: None)
"""What is called every few milliseconds of a long computation: a server lets others have their turn."""


def cooperative_yield() -> None:
    """Let others have their turn, if somebody cares for that."""
    YIELD_HOOK.get()()
