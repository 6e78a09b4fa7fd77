"""Selective activation recomputation: cheap outputs (norms, activations) are recomputed in the backward pass.

A linear layer saves its input for its gradient, even where that input is a norm or an activation of a tensor
that is saved as well. Within `recompute_scope()`, results of `recomputed(function, ...)` are not saved:
unpacking one calls the function again. Gradients are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from unmask.ops.switch import fast_paths_enabled


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), which must be cheap, without side effects and deterministic."""
    value = function(*inputs)
    if torch.compiler.is_compiling() or not value.requires_grad or (hooks := _ACTIVE_HOOKS.get()) is None:
        return value
    if address := _data_ptr(value):  # 0 if the tensor is empty or a meta tensor
        hooks.recomputables[address] = _Recomputable(value, function, inputs)
    return value


@contextmanager
def recompute_scope() -> Iterator[None]:
    """Within this context, results of `recomputed` are not saved for the backward pass.

    They stay in memory until its end, so wrap one block of a network at a time.
    """
    hooks = _enter_hooks() if torch.is_grad_enabled() and not torch.compiler.is_compiling() else None
    if hooks is None:
        yield
        return
    saved, context = hooks
    token = _ACTIVE_HOOKS.set(saved)
    try:
        yield
    finally:
        _ACTIVE_HOOKS.reset(token)
        context.__exit__()
        saved.clear()


class _Recomputable:
    """A tensor, and the call that gave it."""

    def __init__(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        # While this reference exists, no other tensor can have the same address.
        self.value: Tensor | None = value
        self.dtype, self.version = value.dtype, value._version
        self.function, self.inputs, self.versions = function, inputs, _versions(inputs)
        device_type = value.device.type
        dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        self.autocast = torch.autocast(device_type, dtype, enabled)

    def recompute(self) -> Tensor:
        if _versions(self.inputs) != self.versions:
            raise RuntimeError("an input of a recomputed function was changed in place before the backward pass")
        with torch.no_grad(), self.autocast:
            return self.function(*self.inputs)


def _versions(inputs: tuple[Any, ...]) -> list[int]:
    return [value._version for value in inputs if isinstance(value, Tensor)]


class _View(NamedTuple):
    """A view of a tensor that can be recomputed."""

    base: _Recomputable
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _SavedTensorHooks:
    """Saves views of recomputable tensors as `_View`s, and all other tensors as they are."""

    def __init__(self) -> None:
        self.recomputables: dict[int, _Recomputable] = {}

    def pack(self, tensor: Tensor) -> Tensor | _View:
        base = self.recomputables.get(_data_ptr(tensor))
        if base is None or (base.dtype, base.version) != (tensor.dtype, tensor._version):
            return tensor
        return _View(base, tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.base.recompute().as_strided(packed.shape, packed.stride, packed.offset)

    def clear(self) -> None:
        for recomputable in self.recomputables.values():
            recomputable.value = None
        self.recomputables.clear()


_ACTIVE_HOOKS: ContextVar[_SavedTensorHooks | None] = ContextVar("active_hooks", default=None)


def _enter_hooks() -> tuple[_SavedTensorHooks, saved_tensors_hooks] | None:
    """Hooks that are active now; None without fast paths, and in transforms of torch.func, which allow no hooks."""
    if not fast_paths_enabled():
        return None
    saved = _SavedTensorHooks()
    context = saved_tensors_hooks(saved.pack, saved.unpack)
    try:
        context.__enter__()
    except RuntimeError:
        return None
    return saved, context


def _data_ptr(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
