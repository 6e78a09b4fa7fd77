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


class _Recomputable:
    """A value, and how it came about."""

    def __init__(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        # As long as the value is there, no other one can stand in its place in memory.
        self.value: Tensor | None = value
        self.dtype, self.version = value.dtype, value._version
        self.function, self.inputs, self.versions = function, inputs, _versions(inputs)
        kind = value.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.autocast = torch.autocast(kind, dtype, enabled)

    def recompute(self) -> Tensor:
        if _versions(self.inputs) != self.versions:
            raise RuntimeError("what a value was computed from has been changed in place since")
        with torch.no_grad(), self.autocast:
            return self.function(*self.inputs)


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    return [each._version for each in inputs if isinstance(each, Tensor)]


class _View(NamedTuple):
    """A view of a value."""

    base: _Recomputable
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _SavedTensorHooks:
    """What stands where in memory, and can be computed again."""

    def __init__(self) -> None:
        self.recomputables: dict[int, _Recomputable] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        made = self.recomputables.get(_data_ptr(tensor))
        if made is None or (made.dtype, made.version) != (tensor.dtype, tensor._version):
            return tensor
        return _View(made, tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.base.recompute().as_strided(packed.shape, packed.stride, packed.offset)

    def clear(self) -> None:
        for made in self.recomputables.values():
            made.value = None
        self.recomputables.clear()


_ACTIVE_HOOKS: ContextVar[_SavedTensorHooks | None] = ContextVar("active_hooks", default=None)


@contextmanager
def recompute_scope() -> Iterator[None]:
    """Here, values of `again` are not kept for the backward pass. They exist until the end of this."""
    hooks = _enter_hooks() if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
    if hooks is None:
        yield
        return
    sparing, within = hooks
    token = _ACTIVE_HOOKS.set(sparing)
    try:
        yield
    finally:
        _ACTIVE_HOOKS.reset(token)
        within.__exit__()
        sparing.clear()


def _enter_hooks() -> tuple[_SavedTensorHooks, saved_tensors_hooks] | None:
    """Entered; None in transforms of torch.func, which refuse hooks."""
    sparing = _SavedTensorHooks()
    hooks = saved_tensors_hooks(sparing.pack, sparing.unpack)
    try:
        hooks.__enter__()
    except RuntimeError:
        return None
    return sparing, hooks


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), which takes little time, changes nothing and draws nothing at random."""
    value = function(*inputs)
    if torch.compiler.is_compiling() or not value.requires_grad or (now := _ACTIVE_HOOKS.get()) is None:
        return value
    if place := _data_ptr(value):  # none if it is empty, or on no device
        now.recomputables[place] = _Recomputable(value, function, inputs)
    return value


def _data_ptr(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
