"""Schemas that texts are drawn from, and schemas that were written to do harm."""

from __future__ import annotations

import json
from typing import Any

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
}
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "parts": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["parts"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object", "additionalProperties": True},
    "any value": True,
    "person": {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "emails": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "all optional": {"properties": {key: {"type": "boolean"} for key in ("a", "b", "c", "d")}},
    "enum": {"enum": ["red", 'a "quoted" one\n', 3, None, True, 1.5, {"a": [1, {"b": 2}]}]},
    "const": {
        "type": "object",
        "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}},
        "required": ["r"],
    },
    "types": {"type": ["string", "null", "integer"]},
    "nullable": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]},
    "integers": {"type": "array", "items": {"type": "integer", "minimum": -17, "maximum": 1203}, "minItems": 2},
    "exclusive": {"type": "array", "items": {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12.5}},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -2, "exclusiveMaximum": 10}, "minItems": 1},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 5,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]+-[0-9]{2,}$", "maxLength": 9},
    "found": {"type": "string", "pattern": 'b"|\\\\', "minLength": 3},
    "formats": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}},
        "required": ["day"],
    },
    "moments": {"anyOf": [{"type": "string", "format": name} for name in ("date-time", "email", "ipv4", "time")]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "string"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "null"}}, "required": ["kind"]},
            {"type": "integer"},
        ]
    },
    "all of": {
        "allOf": [
            {"$ref": "#/$defs/named"},
            {"properties": {"size": {"type": "integer", "minimum": 5}}, "required": ["size"]},
        ],
        "properties": {"size": {"maximum": 20}},
        "$defs": {"named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    },
    "other members": {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "ix": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": {"type": "string"},
    },
    "nested": {
        "type": "object",
        "properties": {
            "rows": {
                "type": "array",
                "items": {"type": "object", "properties": {"cells": {"type": "array", "items": {"type": "integer"}}}},
            }
        },
        "required": ["rows"],
    },
    "recursive list": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "recursive tree": TREE,
}


def hostile_schemas() -> list[Any]:
    """Schemas that would take for ever, or all memory, if nothing were counted."""
    deep: Any = {"type": "null"}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "minItems": 2}
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}
    joining = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}
    last = {"d40": {"type": "integer"}}
    ternary = {"type": "object", "properties": {key: {"$ref": "#"} for key in "abcdefghij"}}
    levels: Any = {"type": "integer"}
    options: Any = {"type": "integer"}
    for number in range(90):
        levels = {"properties": {f"key {number}": levels}, "required": [f"key {number}"]}
        options = {"anyOf": [options, {"type": "string", "maxLength": number}]}
    endless = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    return [
        deep,
        {"$ref": "#/$defs/d0", "$defs": {**doubling, **last}},
        {"$ref": "#/$defs/d0", "$defs": {**joining, **last}},
        {"$ref": "#"},
        {"$ref": "#", "minimum": 3},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        ternary,
        {"type": "string", "minLength": 10**9},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**12},
        {"type": "integer", "minimum": 10**300},
        {"type": "integer", "maximum": 1e308},
        {"type": "string", "pattern": "(a|b)*a(a|b){13}"},
        {"type": "string", "pattern": "((((a{99}){99}){99}){99}){99}"},
        {"type": "string", "pattern": "(.*a){30}", "minLength": 40},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
        {"enum": [f"value {n * n}" for n in range(3000)]},
        {"additionalProperties": True, "properties": {f"{n * 7919}": {} for n in range(300)}},
        {"prefixItems": [{"type": "string"}] * 400},
        {"oneOf": [{"type": "object", "required": ["a"]}] * 300},
        json.loads('{"not":' * 90 + "{}" + "}" * 90),
        levels,
        options,
        endless,
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"enum": [1, 2]}, {"minimum": 3}]},
        {"type": "string", "minLength": 4, "maxLength": 3},
        {"type": "string", "pattern": "^a$", "minLength": 2},
        {"type": "string", "pattern": "(a*)*(b|a+)*$"},
        {"type": "string", "pattern": "(x+x+)+y"},
        {"type": "string", "pattern": "[^x]{0,900}x[^y]{0,900}"},
        {"type": "string", "pattern": ".*" * 60},
        {"type": "string", "pattern": "(" * 60 + "a" + "?)" * 60},
        {"type": "string", "pattern": "\\w{1,700}\\d{1,700}", "format": "email", "maxLength": 600},
        {"prefixItems": [{"$ref": "#/$defs/s"}] * 2000, "$defs": {"s": {"type": "string", "format": "date-time"}}},
        {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1200}},
        {"type": "array", "items": {"type": "array", "items": {"type": "string", "maxLength": 300}}, "maxItems": 9},
        {"enum": [[[[["deep", {"a": [n]}]]]] for n in range(1500)]},
        {"const": {"a": "x" * 30_000}},
    ]
