"""Frozen dataclasses to JSON and back, with typed unions told apart by a `kind`.

Reading is strict: an unknown kind, field or type is refused in one sentence that says where it stands
and what would be right. Nothing is executed.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

JSON = Any


def to_json(value: Any) -> JSON:
    """Plain dicts, lists and scalars; a dataclass also says its `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{value!r} cannot be written to a config file, so what holds it (a FromRate schedule?)"
        " cannot be saved"
    )


def from_json(kind: Any, data: JSON, where: str = "config") -> Any:
    """An object of type `kind` (a dataclass, a union of them, or a plain type)."""
    options = _options(kind)
    parts = [option for option in options if dataclasses.is_dataclass(option)]
    if parts and isinstance(data, dict):
        return _part(parts, data, where)
    for option in options:
        if get_origin(option) is tuple and isinstance(data, list):
            item = get_args(option)[0]
            return tuple(from_json(item, value, f"{where}[{i}]") for i, value in enumerate(data))
        if option is float and isinstance(data, int) and not isinstance(data, bool):
            return float(data)
        if isinstance(option, type) and type(data) is option:
            return data
    expected = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{where} must be {expected}; got {data!r}")


def _options(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        return [leaf for option in get_args(kind) for leaf in _options(option)]
    return [kind]


def _part(parts: list[Any], data: dict[str, JSON], where: str) -> Any:
    names = {part.__name__: part for part in parts}
    name = data.get("kind", next(iter(names)) if len(names) == 1 else None)
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{where} has kind {name!r}; known are {', '.join(names)}{_hint(name, names)}")
    part = names[name]
    hints = get_type_hints(part)
    given = {key: value for key, value in data.items() if key != "kind"}
    known = [field.name for field in dataclasses.fields(part)]
    for key in given:
        if key not in known:
            raise ValueError(
                f"{where} has an unknown field {key!r}; {name} has {', '.join(known)}{_hint(key, known)}"
            )
    values = {key: from_json(hints[key], value, f"{where}.{key}") for key, value in given.items()}
    for field in dataclasses.fields(part):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise ValueError(f"{where} is incomplete: {name} needs {field.name!r}")
    try:
        return part(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _hint(word: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
