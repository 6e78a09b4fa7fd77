"""Conversations: lists of messages in OpenAI's form, checked and brought into the form that templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""{"role": "user", "content": "Hello"}; an assistant's may have `tool_calls`, a tool's has the `tool_call_id`."""

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
"""Who may speak. OpenAI's `developer` is `system`."""
_KEPT_FIELDS = ("name", "reasoning_content", "tool_call_id")
"""Other fields of a message that templates may read."""


def parse_messages(messages: Any, where: str = "the conversation") -> list[dict[str, Any]]:
    """The messages of a conversation, checked one by one and in their order; `where` it is, for errors.

    Texts in parts are joined, and the arguments of tool calls, which clients send as JSON, are objects.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{where} has no list of messages, as in [{{'role': 'user', 'content': 'Hello'}}]")
    parsed: list[dict[str, Any]] = []
    for number, message in enumerate(messages, start=1):
        parsed.append(_parse_message(message, f"{where} message {number}"))
        _check_order(parsed, f"{where} message {number}")
    return parsed


def parse_tools(tools: Any, where: str = "the conversation") -> list[dict[str, Any]] | None:
    """The tools that an assistant may call, in OpenAI's form; None for none."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"{where} has tools that are not a list of functions")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where} has a tool that is not of the form"
                ' {"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
    return [dict(tool) for tool in tools]


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object with role and content; got {type(message).__name__}")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise ValueError(f"{where} has the role {str(role)[:40]!r}; there are {', '.join(ROLES)}")
    calls = _parse_calls(message.get("tool_calls"), where)
    if calls and role != ASSISTANT:
        raise ValueError(f"{where} has tool calls of {role!r}; only the assistant calls tools")
    given = message.get("content")
    may_be_empty = bool(calls) or role == "tool" or (role == ASSISTANT and given == "")  # models do answer nothing
    content = _parse_content(given, where, may_be_empty)
    kept = {name: message[name] for name in _KEPT_FIELDS if message.get(name) is not None}
    return {"role": role, "content": content, **kept, **({"tool_calls": calls} if calls else {})}


def _parse_content(content: Any, where: str, may_be_empty: bool) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where} has a part of type {str(kind)[:40]!r}; this model reads text only")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where} has {type(content).__name__} in 'content' where a text is expected")
    if not (content or "").strip() and not may_be_empty:
        raise ValueError(f"{where} has no text in 'content'")
    return content or ""


def _parse_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    parsed = []
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where} has a tool call without the name of a function")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{where} calls {function['name'][:40]!r} with arguments that are not a JSON object")
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        parsed.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return parsed


def _check_order(messages: Sequence[Message], where: str) -> None:
    """A tool answers a call; whatever else the order must be is the template's to say."""
    *before, last = messages
    if last["role"] != "tool":
        return
    caller = next((each for each in reversed(before) if each["role"] != "tool"), None)
    calls = [] if caller is None else caller.get("tool_calls", [])
    if not calls:
        raise ValueError(f"{where} is a tool's and follows no call of a tool: roles are out of order")
    known = [call["id"] for call in calls if "id" in call]
    if known and last.get("tool_call_id") not in (None, *known):
        raise ValueError(f"{where} answers the call {last['tool_call_id']!r}; calls before it are {', '.join(known)}")
