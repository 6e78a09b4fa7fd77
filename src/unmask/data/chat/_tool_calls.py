"""Calls of tools, in the forms in which families of models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
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

    def schema(self, functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The JSON schema of a call of one of these functions."""
        calls = []
        for number, function in enumerate(functions):
            parameters = function.get("parameters") or {"type": "object"}
            arguments = _rebased(parameters, f"/anyOf/{number}/properties/{self.arguments_key}")
            properties = {"name": {"const": function["name"]}, self.arguments_key: arguments}
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        return {"anyOf": calls}

    @property
    def tags(self) -> tuple[str, str]:
        """What stands around the object of a call."""
        return (self.begin, self.end) if self.end else ("", "")


def _rebased(schema: Any, place: str) -> Any:
    """A schema that is now at a place inside another one, with references that say so."""
    if isinstance(schema, list):
        return [_rebased(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _rebased(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    return (
        moved | {"$ref": f"#{place}{reference[1:]}"} if isinstance(reference, str) and reference[:1] == "#" else moved
    )


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
