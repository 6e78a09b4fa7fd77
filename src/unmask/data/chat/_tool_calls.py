"""Calls of tools, in the forms in which families of models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.data.chat._template import ChatTemplate


@dataclass(frozen=True)
class ToolCall:
    """A function that an assistant calls, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls: objects of a name and arguments, perhaps between two tags."""

    begin: str
    """What a call begins with, which no other answer has."""
    end: str
    """What a call ends with."""
    arguments_key: str
    """The key of the arguments."""

    def parse(self, text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
        """The answer without its calls, and the calls; what is no call of these functions stays in the answer."""
        calls: list[ToolCall] = []
        if not self.end:  # the whole answer is one call
            found = self._read(text.strip(), names)
            return ("", [found]) if found else (text, [])

        def take(match: re.Match[str]) -> str:
            found = self._read(match[1], names)
            if found is None:
                return match[0]
            calls.append(found)
            return ""

        pattern = f"\\s*{re.escape(self.begin)}(.*?){re.escape(self.end)}\\s*"
        return re.sub(pattern, take, text, flags=re.DOTALL), calls

    def _read(self, text: str, names: Collection[str]) -> ToolCall | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        arguments = value.get(self.arguments_key, {}) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or value.get("name") not in names:
            return None
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

    def pattern(self, functions: Sequence[dict[str, Any]]) -> str:
        """A regular expression of a call of one of these functions, white space after it included.

        ValueError for parameters beyond what a regular expression can say.
        """
        key = _literal(self.arguments_key)
        calls = []
        for function in functions:
            name, parameters = function["name"], function.get("parameters") or {"type": "object"}
            try:
                arguments = _value_pattern(parameters)
            except ValueError as error:
                raise ValueError(f"a call of {name} cannot be asked for: {error}; take tool_choice auto") from None
            calls.append(rf'\{{"name": {_literal(name)}, {key}: {arguments}\}}')
        begin, end = (_escape(tag) for tag in (self.begin if self.end else "", self.end))
        return rf"{begin}({'|'.join(calls)}){end}[ \n]*"


_FORMATS = (
    (re.compile("<tool_call>"), ToolFormat("<tool_call>", "</tool_call>", "arguments")),
    (re.compile(r'"parameters\\?": '), ToolFormat("{", "", "parameters")),
)
"""What a template writes that explains the form, and the form: ChatML's and Llama 3's."""


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """How models with this template write calls; None if it takes no tools."""
    source = template.tool_source or template.source
    found = (form for pattern, form in _FORMATS if pattern.search(source))
    return next(found, None) if template.takes_tools else None


_STRING = r'"[^"\\\x00-\x1f]*"'
_INTEGER = r"-?(0|[1-9][0-9]{0,11})"
_SIMPLE_TYPES = {
    "string": _STRING,
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]{{1,12}})?",
    "boolean": "(true|false)",
    "null": "null",
}
_NOTES = {"title", "description", "default", "examples", "additionalProperties", "$schema", "strict"}
"""Keywords that do not restrict what is written here: objects have their required properties only."""


def _value_pattern(schema: dict[str, Any]) -> str:
    """A regular expression of JSON texts that are valid under a schema without references."""
    known: dict[str, Callable[[dict[str, Any]], str]] = {
        "const": lambda given: _literal(given["const"]),
        "enum": lambda given: f"({'|'.join(map(_literal, given['enum']))})",
        "anyOf": lambda given: f"({'|'.join(map(_value_pattern, given['anyOf']))})",
        "type": _typed_pattern,
    }
    restricting = set(schema) - _NOTES - {"type", "properties", "required", "items"}
    chosen = next((key for key in known if key in schema), None)
    if chosen is None or restricting - {chosen}:
        raise ValueError(f"{', '.join(sorted(restricting)) or 'a value without a type'} is not supported in parameters")
    return known[chosen](schema)


def _typed_pattern(schema: dict[str, Any]) -> str:
    kind = schema["type"]
    if isinstance(kind, list):
        return f"({'|'.join(_typed_pattern({**schema, 'type': each}) for each in kind)})"
    if kind == "array":
        item = _value_pattern(schema.get("items") or {"type": "string"})
        return rf"\[({item}(, {item}){{0,15}})?\]"
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = [name for name in properties if name in (schema.get("required") or ())]
        inside = ", ".join(f"{_literal(name)}: {_value_pattern(properties[name])}" for name in wanted)
        return rf"\{{{inside}\}}"
    if kind not in _SIMPLE_TYPES:
        raise ValueError(f"the type {str(kind)[:40]!r} is not supported in parameters")
    return _SIMPLE_TYPES[kind]


def _literal(value: Any) -> str:
    """A regular expression of one JSON value."""
    return _escape(json.dumps(value, ensure_ascii=False))


def _escape(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)
