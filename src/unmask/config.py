"""Frozen dataclasses to JSON and back, with typed unions told apart by a `kind`; and changes to them.

Reading is strict: an unknown kind, field or type is refused in one sentence that says where it stands
and what would be right. Nothing is executed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
import types
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_Json = Any
_T = TypeVar("_T")

_MAX_SHOWN_CHARS = 120
"""Characters of a wrong value."""


def to_json(value: Any) -> _Json:
    """Plain dicts, lists and scalars; a dataclass also says its `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{value!r} cannot be written to a config file, so what holds it (a IntegratedRate schedule?) cannot be saved"
    )


def from_json(type_: Any, data: _Json, where: str = "config") -> Any:
    """An object of type `kind` (a dataclass, a union of them, or a plain type).

    The bare name of a dataclass stands for all its defaults.
    """
    options = _union_members(type_)
    parts = [option for option in options if dataclasses.is_dataclass(option)]
    named = {_type_name(part): part for part in parts}
    if isinstance(data, str) and data in named:
        data = _default_json(named[data])
    if parts and isinstance(data, dict):
        return _build_dataclass(parts, data, where)
    for option in options:
        if get_origin(option) is tuple and isinstance(data, list):
            items = _item_types(option, len(data), where)
            return tuple(
                from_json(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(zip(items, data, strict=True))
            )
        if option is float and isinstance(data, int) and not isinstance(data, bool):
            return float(data)
        if isinstance(option, type) and type(data) is option:
            return data
    expected = " or ".join("None" if option is types.NoneType else _type_name(option) for option in options)
    hint = suggest(data, named) if isinstance(data, str) else ""
    raise ValueError(f"{where} must be {expected}; got {_abbreviate(data)}{hint}")


def override(config: _T, *changes: str) -> _T:
    """The config with changes such as `training.max_grad_norm=0.5` made, all together and in their order.

    A value is written as in JSON, but for texts, which need no quotes; kinds, whose bare name stands for all
    their defaults (`training.optimizer=Muon`); and lists, whose items may just be separated by commas.
    """
    tree = to_json(config)
    for change in changes:
        _apply_override(type(config), tree, change)
    changed: _T = from_json(type(config), tree, type(config).__name__.lower())
    return changed


def suggest(word: Any, candidates: Iterable[str]) -> str:
    """A question in brackets, if one of the known words is close; else nothing. Case does not count."""
    words = {each.lower(): each for each in candidates}
    close = difflib.get_close_matches(str(word).lower(), words, n=1)
    return f" (did you mean {words[close[0]]}?)" if close else ""


def lookup(name: str, choices: Mapping[str, _T], what: str) -> _T:
    """The choice of that name; otherwise a sentence that says which there are."""
    if not isinstance(name, str) or name not in choices:
        hint = suggest(name, choices) if isinstance(name, str) else ""
        raise ValueError(f"there is no {what} {name!r}{hint}; there are {', '.join(choices)}")
    return choices[name]


def is_number(value: object) -> bool:
    """Whether it is a number; a text of digits and a truth value are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _apply_override(type_: Any, node: _Json, override_text: str) -> None:
    """Carry out one change on the JSON `node` of a `kind`."""
    path, equals, text = (part.strip() for part in override_text.partition("="))
    if not path or not equals:
        raise ValueError(f"a change is written field=value or part.field=value; got {override_text!r}")
    *outer, last = path.split(".")
    where = ""
    for name in outer:
        type_ = _field_type(type_, node, name, where)
        node, where = node.get(name), f"{where}.{name}".strip(".")
    type_ = _field_type(type_, node, last, where)
    parts = {_type_name(option): option for option in _union_members(type_) if dataclasses.is_dataclass(option)}
    if text in parts:  # whatever it still lacks may come with the next change
        node[last] = _default_json(parts[text])
    else:
        node[last] = to_json(from_json(type_, _parse_value(type_, text), path))


def _field_type(type_: Any, node: _Json, name: str, where: str) -> Any:
    """The type of a field of the part that `node` holds."""
    parts = {_type_name(option): option for option in _union_members(type_) if dataclasses.is_dataclass(option)}
    if not isinstance(node, dict):
        choose = f"; choose one first, as in {where}={next(iter(parts))}" if parts else ""
        raise ValueError(f"{where} is {node!r} and has no field {name!r}{choose}")
    part = parts[node["kind"]]
    _validate_field(part, name, where or _type_name(part).lower())
    return get_type_hints(part)[name]


def _default_json(cls: Any) -> _Json:
    """The JSON of a part as far as its fields have defaults."""
    tree = {"kind": _type_name(cls)}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            tree[field.name] = to_json(field.default_factory())
        elif field.default is not dataclasses.MISSING:
            tree[field.name] = to_json(field.default)
    return tree


def _parse_value(type_: Any, text: str) -> _Json:
    """The JSON that a text stands for where a `kind` is wanted."""
    options = _union_members(type_)
    if types.NoneType in options and text.lower() in ("none", "null"):
        return None
    lists = [option for option in options if get_origin(option) is tuple]
    if lists and not text.startswith("["):
        item = get_args(lists[0])[0]
        return [_parse_value(item, each.strip()) for each in text.split(",")] if text else []
    try:
        data = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return text if str in options and not isinstance(data, str) else data


def _item_types(option: Any, length: int, where: str) -> list[Any]:
    """The types of the items of a tuple: all alike in tuple[X, ...], else as many as are named."""
    items = get_args(option)
    if items[-1] is Ellipsis:
        return [items[0]] * length
    if len(items) != length:
        raise ValueError(f"{where} must have {len(items)} items; got {length}")
    return list(items)


def _abbreviate(data: _Json) -> str:
    """What strangers wrote is shown in part: it may be long, or deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_SHOWN_CHARS
    text = short.repr(data)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _type_name(option: Any) -> str:
    return getattr(option, "__name__", str(option))


def _union_members(type_: Any) -> list[Any]:
    if get_origin(type_) in (Union, types.UnionType):
        return [leaf for option in get_args(type_) for leaf in _union_members(option)]
    return [type_]


def _build_dataclass(candidates: list[Any], data: dict[str, _Json], where: str) -> Any:
    names = {part.__name__: part for part in candidates}
    name = data.get("kind", next(iter(names)) if len(names) == 1 else None)
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{where} has kind {_abbreviate(name)}; known are {', '.join(names)}{suggest(name, names)}")
    part = names[name]
    hints = get_type_hints(part)
    given = {key: value for key, value in data.items() if key != "kind"}
    for key in given:
        _validate_field(part, key, where)
    values = {key: from_json(hints[key], value, f"{where}.{key}") for key, value in given.items()}
    for field in dataclasses.fields(part):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise ValueError(f"{where} is incomplete: {name} needs {field.name!r}")
    try:
        return part(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _validate_field(cls: Any, name: str, where: str) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    if name not in known:
        raise ValueError(
            f"{where} has an unknown field {_abbreviate(name)}; {_type_name(cls)} has {', '.join(known)}"
            f"{suggest(name, known)}"
        )
