"""Frozen dataclasses to JSON and back, changes to them, and the tables of named parts.

A field that may hold one of several dataclasses says which by its `kind`: the class name for classes of
unmask, "package.module:Name" for classes from elsewhere. Reading is strict: an unknown kind, field or type is
refused in one sentence that says where it is and what would be right. Code from elsewhere is imported only if
the caller allows it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from numbers import Real
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from unmask.registry import AllowCode, Family, class_id, family_of, resolve

_Json = Any
_T = TypeVar("_T")

_MAX_SHOWN_CHARS = 120
"""Characters of a wrong value that an error message shows."""
_MIN_SIMILARITY = 0.65
"""Similarity (difflib's ratio) from which on a known word is suggested for an unknown one."""


def to_json(value: Any) -> _Json:
    """Plain dicts, lists and scalars; a dataclass also states its `kind`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": class_id(type(value)), **fields}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{value!r} cannot be written to a config file, which holds numbers, texts, lists and dataclasses only"
        " (an IntegratedRate schedule is a function, for example)"
    )


def from_json(type_: Any, data: _Json, where: str = "config", *, allow_code: AllowCode = False) -> Any:
    """An object of `type_` (a dataclass, the base class of a family, a union of them, or a plain type).

    The bare name of a dataclass stands for all its defaults. A kind "package.module:Name" is imported only if
    `allow_code` is True or contains it.
    """
    return _Reader(allow_code).read(type_, data, where)


def override(config: _T, *changes: str, allow_code: AllowCode = False) -> _T:
    """The config with changes such as `training.max_grad_norm=0.5`, applied in order and checked together.

    A value is written as in JSON, with three shortcuts: texts need no quotes; the bare name of a kind stands for
    its defaults (`training.optimizer=Muon`); items of lists may just be separated by commas.
    """
    tree, reader = to_json(config), _Reader(allow_code)
    for change in changes:
        _apply_override(reader, type(config), tree, change)
    # What is code here was in the config already, or passed the reader above.
    changed: _T = from_json(type(config), tree, type(config).__name__.lower(), allow_code=True)
    return changed


def external_kinds(value: Any) -> set[str]:
    """The kinds of classes from outside the package that a config holds."""

    def walk(node: _Json) -> Iterator[str]:
        if isinstance(node, dict):
            if ":" in node["kind"]:
                yield node["kind"]
            node = list(node.values())
        if isinstance(node, list):
            for item in node:
                yield from walk(item)

    return set(walk(to_json(value)))


def describe_type(type_: Any) -> str:
    """A type in words, as in "int or None"; for a part, the names of its kinds."""
    members = _union_members(type_)
    return " or ".join([*_known_kinds(members), *(_type_name(each) for each in members if not _is_part(each))])


def suggest(word: Any, candidates: Iterable[str]) -> str:
    """ " (did you mean X?)" if a known word is similar, else nothing; case and leading dashes do not count."""
    words = {each.lower().lstrip("-"): each for each in candidates}
    close = difflib.get_close_matches(str(word).lower().lstrip("-"), words, n=1, cutoff=_MIN_SIMILARITY)
    return f" (did you mean {words[close[0]]}?)" if close else ""


def lookup(name: str, choices: Mapping[str, _T], what: str) -> _T:
    """The choice of that name; otherwise a sentence that lists the choices."""
    if not isinstance(name, str) or name not in choices:
        hint = suggest(name, choices) if isinstance(name, str) else ""
        raise ValueError(f"there is no {what} {name!r}{hint}; there are {', '.join(choices)}")
    return choices[name]


def is_number(value: object) -> bool:
    """Whether it is a number; texts of digits and booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Builds objects from JSON, importing only the code that is allowed."""

    allow_code: AllowCode

    def read(self, type_: Any, data: _Json, where: str) -> Any:
        members = _union_members(type_)
        kinds = _known_kinds(members)
        if isinstance(data, str) and kinds and self._is_kind(data, kinds):
            data = _default_json(self.find_class(data, members, where))
        if kinds and isinstance(data, dict):
            return self._build(members, data, where)
        for member in members:
            if get_origin(member) is tuple and isinstance(data, list):
                items = zip(_item_types(member, len(data), where), data, strict=True)
                return tuple(self.read(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(items))
            if member is float and isinstance(data, int) and not isinstance(data, bool):
                return float(data)
            if isinstance(member, type) and type(data) is member:
                return data
        hint = suggest(data, kinds) if isinstance(data, str) else ""
        raise ValueError(f"{where} must be {describe_type(type_)}; got {_abbreviate(data)}{hint}")

    def find_class(self, kind: Any, members: list[Any], where: str) -> Any:
        """The dataclass that a `kind` names, among the members of a union."""
        kinds = _known_kinds(members)
        if not isinstance(kind, str) or not self._is_kind(kind, kinds):
            known = ", ".join(kinds)
            raise ValueError(f"{where} has kind {_abbreviate(kind)}; known are {known}{suggest(kind, kinds)}")
        if kind in kinds:
            return kinds[kind]()
        known_classes = {class_id(each): each for each in members if isinstance(each, type) and _is_part(each)}
        if kind in known_classes:  # the type itself names it
            return known_classes[kind]
        bases = tuple(family.base for family in map(_family, members) if family is not None)
        return self._import_class(kind, bases, where)

    @staticmethod
    def _is_kind(name: str, kinds: Collection[str]) -> bool:
        return name in kinds or (":" in name and all(map(str.isidentifier, name.replace(":", ".").split("."))))

    def _import_class(self, kind: str, bases: tuple[type, ...], where: str) -> Any:
        if not bases:
            raise ValueError(f"{where} cannot be {kind}: only the kinds of unmask fit here")
        if self.allow_code is not True and (self.allow_code is False or kind not in self.allow_code):
            raise ValueError(
                f"{where} needs the class {kind}, which is code from outside unmask and is imported only if you allow"
                " it: pass allow_code=True, or --allow-code on the command line"
            )
        found = resolve(kind, bases[0])
        if not isinstance(found, type) or not dataclasses.is_dataclass(found):
            raise ValueError(f"{where} needs the class {kind} to be a dataclass, so that its fields can be set")
        return found

    def _build(self, members: list[Any], data: dict[str, _Json], where: str) -> Any:
        kinds = _known_kinds(members)
        only = next(iter(kinds)) if len(kinds) == 1 else None
        cls = self.find_class(data.get("kind", only), members, where)
        given = {key: value for key, value in data.items() if key != "kind"}
        for key in given:
            _validate_field(cls, key, where)
        hints = field_types(cls)
        values = {key: self.read(hints[key], value, f"{where}.{key}") for key, value in given.items()}
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in given:
                raise ValueError(f"{where} is incomplete: {cls.__name__} needs {field.name!r}")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _apply_override(reader: _Reader, type_: Any, node: _Json, text: str) -> None:
    """Apply one change, as in `part.field=value`, to the JSON `node` of a `type_`."""
    path, equals, value = (part.strip() for part in text.partition("="))
    if not path or not equals:
        raise ValueError(f"a change is written field=value or part.field=value; got {text!r}")
    *outer, last = path.split(".")
    where = ""
    for name in outer:
        type_ = _inner_type(type_, node, name, where)
        node, where = node.get(name), f"{where}.{name}".strip(".")
    type_ = _inner_type(type_, node, last, where)
    members = _union_members(type_)
    if value in (kinds := _known_kinds(members)):  # required fields may come with the next change
        node[last] = _default_json(kinds[value]())
    elif kinds and ":" in value and not value.startswith(("{", "[")):
        node[last] = _default_json(reader.find_class(value, members, path))
    else:
        node[last] = to_json(reader.read(type_, _parse_value(type_, value), path))


def _inner_type(type_: Any, node: _Json, name: str, where: str) -> Any:
    """The type of the field `name` of the part that `node` is."""
    members = _union_members(type_)
    if not isinstance(node, dict):
        kinds = _known_kinds(members)
        choose = f"; choose one first, as in {where}={next(iter(kinds))}" if kinds else ""
        raise ValueError(f"{where} is {node!r} and has no field {name!r}{choose}")
    cls = _Reader(allow_code=True).find_class(node["kind"], members, where)  # `node` was an object a moment ago
    _validate_field(cls, name, where or _type_name(cls).lower())
    return field_types(cls)[name]


def _default_json(cls: Any) -> _Json:
    """The JSON of a part, as far as its fields have defaults."""
    tree = {"kind": class_id(cls)}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            tree[field.name] = to_json(field.default_factory())
        elif field.default is not dataclasses.MISSING:
            tree[field.name] = to_json(field.default)
    return tree


def _parse_value(type_: Any, text: str) -> _Json:
    """The JSON value of a text where a `type_` is expected."""
    members = _union_members(type_)
    if types.NoneType in members and text.lower() in ("none", "null"):
        return None
    lists = [member for member in members if get_origin(member) is tuple]
    if lists and not text.startswith("["):
        item = get_args(lists[0])[0]
        return [_parse_value(item, each.strip()) for each in text.split(",")] if text else []
    try:
        data = json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text
    return text if str in members and not isinstance(data, str) else data


def _item_types(option: Any, length: int, where: str) -> list[Any]:
    """The types of the items of a tuple: all alike in tuple[X, ...], else one for each item."""
    items = get_args(option)
    if items[-1] is Ellipsis:
        return [items[0]] * length
    if len(items) != length:
        raise ValueError(f"{where} must have {len(items)} items; got {length}")
    return list(items)


def _union_members(type_: Any) -> list[Any]:
    if get_origin(type_) in (Union, types.UnionType):
        return [leaf for option in get_args(type_) for leaf in _union_members(option)]
    return [type_]


def _family(member: Any) -> Family[Any] | None:
    """The family whose base class a type is."""
    return family_of(member) if isinstance(member, type) else None


def _is_part(member: Any) -> bool:
    return dataclasses.is_dataclass(member) or _family(member) is not None


def _known_kinds(members: list[Any]) -> dict[str, Callable[[], Any]]:
    """Kind -> a function that gives the class, of all dataclasses that the members of a union allow."""
    kinds: dict[str, Callable[[], Any]] = {}
    for member in members:
        family = _family(member)
        if family is not None:
            for table in (family, *family.extensions):
                kinds |= {kind: partial(table.__getitem__, name) for kind, name in table.class_names.items()}
        elif dataclasses.is_dataclass(member):
            kinds[_type_name(member)] = partial(_identity, member)
    return kinds


def _identity(cls: Any) -> Any:
    return cls


def field_types(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    try:
        return _type_hints(cls)
    except NameError as error:
        raise ValueError(f"the fields of {cls.__name__} cannot be read: {error}") from None


@cache
def _type_hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _validate_field(cls: Any, name: str, where: str) -> None:
    known = [field.name for field in dataclasses.fields(cls)]
    if name not in known:
        raise ValueError(
            f"{where} has an unknown field {_abbreviate(name)}; {_type_name(cls)} has {', '.join(known)}"
            f"{suggest(name, known)}"
        )


def _abbreviate(data: _Json) -> str:
    """A value, shortened: what comes from a file may be long, or deeply nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_SHOWN_CHARS
    text = short.repr(data)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _type_name(option: Any) -> str:
    return "None" if option is types.NoneType else getattr(option, "__name__", str(option))
