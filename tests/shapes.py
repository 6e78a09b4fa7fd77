"""Shapes are checked while tests run: `check_shapes("unmask")` in conftest.py switches it on.

Every function and method of the package whose parameters or result are annotated as in `Float[Tensor, "N V"]` is
checked at each call, and a dimension has one size within a call. Other annotations are mypy's business: tests hand
wrong types to the package on purpose, to see what it says. (jaxtyping's own import hook wraps every function of a
package, annotated so or not, which makes the tests half as slow again.)
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from greenlet import getcurrent
from jaxtyping import AbstractArray, jaxtyped

CHECKED: set[str] = set()
"""The functions that are checked, by module and name."""


class ShapeError(TypeError):
    """A tensor does not have the shape or type that its annotation says."""


def check_shapes(package: str) -> None:
    """Check shapes in all modules of a package that are imported from now on."""
    assert package not in sys.modules, f"{package} was imported before its shapes could be checked"
    sys.meta_path.insert(0, _Finder(package))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _wrap_all(module, vars(module))
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                _wrap_all(value, vars(module))


def _wrap_all(owner: Any, names: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        kind = type(value) if isinstance(value, staticmethod | classmethod) else None
        function = value.__func__ if kind else value
        if isinstance(function, FunctionType) and function.__module__ == names["__name__"]:
            hints = _array_hints(function, names)
            if hints:
                CHECKED.add(f"{function.__module__}.{function.__qualname__}")
                wrapped = _checked(function, hints)
                setattr(owner, name, kind(wrapped) if kind else wrapped)


def _checked(function: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if getcurrent().parent is None:
            with jaxtyped("context"):  # type: ignore[call-overload]
                check_arguments(arguments)
                result = function(*args, **kwargs)
                check_result(result)
            return result
        # Jobs of the server take turns within calls, and contexts are a stack of the thread: none is kept open.
        with jaxtyped("context"):  # type: ignore[call-overload]
            check_arguments(arguments)
        result = function(*args, **kwargs)
        with jaxtyped("context"):  # type: ignore[call-overload]
            check_arguments(arguments)
            check_result(result)
        return result

    def check_arguments(arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            if name in hints:
                _check(f"{name} of {function.__qualname__}", value, hints[name])

    def check_result(result: Any) -> None:
        if "return" in hints:
            _check(f"the result of {function.__qualname__}", result, hints["return"])

    return checked


def _array_hints(function: FunctionType, names: dict[str, Any]) -> dict[str, Any]:
    """The annotations that contain shapes. One that cannot be evaluated is an error: it would never be checked."""
    texts = inspect.get_annotations(function)
    if not any("[Tensor, " in text or "LogX" in text for text in texts.values() if isinstance(text, str)):
        return {}
    hints = get_type_hints(function, globalns=names)
    return {name: hint for name, hint in hints.items() if _arrays(hint) or get_origin(hint) is tuple}


def _arrays(hint: Any) -> list[Any]:
    return [part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, AbstractArray)]


def _check(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is tuple and isinstance(value, tuple) and len(value) == len(get_args(hint)):
        for part, part_hint in zip(value, get_args(hint), strict=True):
            _check(name, part, part_hint)
        return
    arrays = _arrays(hint) if isinstance(value, torch.Tensor) else []
    if arrays and not any(isinstance(value, array) for array in arrays):
        expected = " or ".join(array.__name__ for array in arrays)
        raise ShapeError(f"{name} is {value.dtype} {list(value.shape)}, and not {expected}")
