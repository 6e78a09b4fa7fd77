"""Values that the backward pass computes again: to keep them takes much memory, to compute them little time.

A linear layer keeps its input for its gradient, even where that is only a norm or an activation of something
that is kept as well. Within `sparing()`, what came of `again(function, ...)` is computed once more instead;
gradients are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Made:
    """A value, and how it came about."""

    def __init__(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        # As long as the value is there, no other one can stand in its place in memory.
        self.value: Tensor | None = value
        self.dtype, self.version = value.dtype, value._version
        self.function, self.inputs, self.versions = function, inputs, _versions(inputs)
        kind = value.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.autocast = torch.autocast(kind, dtype, enabled)

    def once_more(self) -> Tensor:
        if _versions(self.inputs) != self.versions:
            raise RuntimeError("what a value was computed from has been changed in place since")
        with torch.no_grad(), self.autocast:
            return self.function(*self.inputs)


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    return [each._version for each in inputs if isinstance(each, Tensor)]


class _Seen(NamedTuple):
    """A view of a value."""

    of: _Made
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Sparing:
    """What stands where in memory, and can be computed again."""

    def __init__(self) -> None:
        self.made: dict[int, _Made] = {}

    def pack(self, kept: Tensor) -> Tensor | _Seen:
        made = self.made.get(_place(kept))
        if made is None or (made.dtype, made.version) != (kept.dtype, kept._version):
            return kept
        return _Seen(made, kept.shape, kept.stride(), kept.storage_offset())

    @staticmethod
    def unpack(packed: Tensor | _Seen) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.of.once_more().as_strided(packed.shape, packed.stride, packed.offset)

    def forget(self) -> None:
        for made in self.made.values():
            made.value = None
        self.made.clear()


_now: ContextVar[_Sparing | None] = ContextVar("sparing", default=None)


@contextmanager
def sparing() -> Iterator[None]:
    """Here, values of `again` are not kept for the backward pass. They exist until the end of this."""
    hooks = _hooks() if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
    if hooks is None:
        yield
        return
    sparing, within = hooks
    token = _now.set(sparing)
    try:
        yield
    finally:
        _now.reset(token)
        within.__exit__()
        sparing.forget()


def _hooks() -> tuple[_Sparing, saved_tensors_hooks] | None:
    """Entered; None in transforms of torch.func, which refuse hooks."""
    sparing = _Sparing()
    hooks = saved_tensors_hooks(sparing.pack, sparing.unpack)
    try:
        hooks.__enter__()
    except RuntimeError:
        return None
    return sparing, hooks


def again(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), which takes little time, changes nothing and draws nothing at random."""
    value = function(*inputs)
    if torch.compiler.is_compiling() or not value.requires_grad or (now := _now.get()) is None:
        return value
    if place := _place(value):  # none if it is empty, or on no device
        now.made[place] = _Made(value, function, inputs)
    return value


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
