"""The type checker that jaxtyping calls while tests run: tensors' dtypes and shapes, and nothing else.

Every function of the package whose parameters or result are annotated as in `Float[Tensor, "N V"]` is checked at
each call, and a dimension has one size within a call. Other annotations are mypy's business: tests hand wrong
types to the package on purpose, to see what it says.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import torch
from jaxtyping import AbstractArray

_Function = Callable[..., Any]


def check_shapes(function: _Function) -> _Function:
    """Raise TypeError where a tensor does not have the shape that its annotation says."""
    signature = inspect.signature(function)
    hints: dict[str, Any] | None = None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal hints
        if hints is None:
            hints = _array_hints(function)
        if hints:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                _check(name, value, hints.get(name))
        result = function(*args, **kwargs)
        _check("the result", result, hints.get("return"))
        return result

    return checked


def _array_hints(function: _Function) -> dict[str, Any]:
    """Annotations that say something of arrays; names that only type checkers import are left out."""
    module = sys.modules.get(function.__module__)
    try:
        hints = get_type_hints(function, globalns=vars(module) if module else None)
    except (NameError, TypeError):
        return {}
    return {name: hint for name, hint in hints.items() if _arrays(hint)}


def _arrays(hint: Any) -> list[Any]:
    options = get_args(hint) if not isinstance(hint, type) else (hint,)
    return [option for option in options or (hint,) if isinstance(option, type) and issubclass(option, AbstractArray)]


def _check(name: str, value: Any, hint: Any) -> None:
    if hint is None or not isinstance(value, torch.Tensor):
        return
    options = _arrays(hint)
    if not any(isinstance(value, option) for option in options):
        raise TypeError(f"{name} is {value.dtype} {list(value.shape)}, and not {hint}")
