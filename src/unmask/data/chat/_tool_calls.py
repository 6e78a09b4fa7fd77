"""Calls of tools, in the forms in which families of models write them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.data.chat._template import ChatTemplate


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


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
        calls, texts, start, place = list[ToolCall](), [""], 0, 0
        if not self.end:  # the whole answer is one call
            found, place = self._read(text, 0, names)
            return ("", [found]) if found and not text[place:].strip() else (text, [])
        while (begin := text.find(self.begin, place)) >= 0:
            found, place = self._read(text, begin + len(self.begin), names)
            if found is not None:
                calls.append(found)
                texts[-1] += text[start:begin].rstrip()
                texts.append("")
                place = start = len(text) - len(text[place:].lstrip())
        texts[-1] += text[start:]
        return "\n".join(filter(None, texts)), calls

    def _read(self, text: str, begin: int, names: Collection[str]) -> tuple[ToolCall | None, int]:
        """The call whose object is at `begin`, and where it ends; without one, None and `begin`.

        The object is read as JSON, since its texts may spell what a call ends with.
        """
        try:
            value, end = _JSON.raw_decode(text, begin + len(text[begin:]) - len(text[begin:].lstrip()))
        except (ValueError, RecursionError):
            return None, begin
        rest = text[end:].lstrip()
        arguments = value.get(self.arguments_key, {}) if isinstance(value, dict) else None
        is_call = isinstance(arguments, dict) and value.get("name") in names and rest.startswith(self.end)
        if not is_call:
            return None, begin
        call = ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
        return call, len(text) - len(rest) + len(self.end)

    def schema(self, functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The JSON schema of a call of one of these functions."""
        calls = []
        for number, function in enumerate(functions):
            parameters = {"type": "object", **(function.get("parameters") or {})}
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
