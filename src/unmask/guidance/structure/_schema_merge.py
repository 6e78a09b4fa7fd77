"""Schemas that must hold together, as one schema; and schemas that no value has together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
KEYWORDS_OF_TYPE = {
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties"),
}
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
    ]
)
"""What says nothing about values, or only names them for others."""

_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 is not true, but it is 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def type_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that `enum` and `const` leave; None without them."""
    if "const" not in schema:
        return list(schema["enum"]) if "enum" in schema else None
    return [value for value in schema.get("enum", [schema["const"]]) if same_value(value, schema["const"])]


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types of a schema's values: given, or those that its keywords are about, or all."""
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    if types is None:
        about = [name for name, keywords in KEYWORDS_OF_TYPE.items() if any(word in schema for word in keywords)]
        types = [name for name in about if not (name == "integer" and "number" in about)] or list(TYPES)
    return [*types, "null"] if schema.get("nullable") is True and "null" not in types else list(types)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that holds where both hold; ValueError if it cannot be written as one."""
    own = {word: value for word, value in one.items() if word not in ANNOTATIONS}
    added = {word: value for word, value in other.items() if word not in ANNOTATIONS}
    closed = {"additionalProperties"} & (own.keys() | added.keys())
    if closed and own.get("properties", {}).keys() != added.get("properties", {}).keys() and own and added:
        raise ValueError("schemas with different properties are joined, and one of them has 'additionalProperties'")
    result = dict(own)
    for word, value in added.items():
        result[word] = _merged_keyword(word, own[word], value) if word in own else value
    return result


def _merged_keyword(word: str, one: Any, other: Any) -> Any:
    if same_value(one, other):
        return one
    if word in _LOWER or word in _UPPER:
        return (max if word in _LOWER else min)(one, other)
    if word in _MERGES:
        return _MERGES[word](one, other)
    raise ValueError(f"two different {word!r} are joined, which is not supported")


def _merged_schemas(one: Schema, other: Schema) -> Schema:
    if isinstance(one, bool) or isinstance(other, bool):
        return False if one is False or other is False else other if one is True else one
    return merged(one, other)


def _merged_properties(one: Mapping[str, Schema], other: Mapping[str, Schema]) -> dict[str, Schema]:
    return {**one, **{key: _merged_schemas(one.get(key, True), value) for key, value in other.items()}}


def _merged_types(one: Any, other: Any) -> list[str]:
    first, second = types_of({"type": one}), types_of({"type": other})
    common = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return common + ["integer"] * ("integer" in second and "number" in first and "integer" not in common)


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "type": _merged_types,
    "required": lambda one, other: [*one, *(name for name in other if name not in one)],
    "properties": _merged_properties,
    "enum": lambda one, other: [value for value in one if any(same_value(value, each) for each in other)],
    "items": _merged_schemas,
    "additionalProperties": _merged_schemas,
    "nullable": lambda one, other: one and other,
}


def are_disjoint(one: Mapping[str, Any], other: Mapping[str, Any], plain: Callable[[Schema], Schema]) -> bool:
    """Whether it can be told that no value has both schemas; `plain` resolves references and `allOf`."""
    ours, theirs = values_of(one), values_of(other)
    if ours is not None and theirs is not None:
        return not any(same_value(a, b) for a in ours for b in theirs)
    first = types_of(one) if ours is None else [type_of(value) for value in ours]
    second = types_of(other) if theirs is None else [type_of(value) for value in theirs]
    if not _merged_types(first, second):
        return True
    if first != ["object"] or second != ["object"]:
        return False
    tags = set(one.get("required", ())) & set(other.get("required", ()))
    for key in tags & one.get("properties", {}).keys() & other.get("properties", {}).keys():
        mine, yours = plain(one["properties"][key]), plain(other["properties"][key])
        if isinstance(mine, Mapping) and isinstance(yours, Mapping) and are_disjoint(mine, yours, plain):
            return True
    return False
