"""Documents from rows of a table: a text, a prompt and its completion, or a chat.

A prompt-completion pair is one chunk of any length, with the length of its prompt. Prompt and completion are
encoded separately, so that no token spans both, and a pair is never split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeAlias

from unmask.data.chat import ASSISTANT, ChatTemplate, named_template, parse_messages, parse_tools
from unmask.data.readers._text import TextChunk, chunk_document, validate_text
from unmask.data.readers.tables import TableReader


class RecordFormat(Protocol):
    """Which columns are read from a row, and the document that their values make."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        ...

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        """The document of a row with these values; `where` it is, for error messages."""
        ...


@dataclass(frozen=True)
class TextRecord:
    """A text in one column; empty rows are skipped."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        (value,) = values
        return chunk_document(validate_text(value, where, self.column), where)


@dataclass(frozen=True)
class PromptCompletion:
    """Two columns (fields of JSON objects): a prompt, and the completion to learn."""

    prompt: str = "prompt"
    """The column of the prompt."""
    completion: str = "completion"
    """The column of the completion."""

    def __post_init__(self) -> None:
        if self.prompt == self.completion:
            raise ValueError(f"prompt and completion must be two columns; got {self.prompt!r} for both")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.completion

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        prompt, completion = (
            _require_text(validate_text(value, where, name), where, repr(name))
            for name, value in zip(self.columns, values, strict=True)
        )
        return (TextChunk(prompt + completion, True, where, len(prompt)),)


@dataclass(frozen=True)
class ChatRecord:
    """A column with a list of messages {"role": ..., "content": ...}, of which those of the assistant are learned.

    Every turn of the assistant is a pair: the conversation before it, up to where the answer begins, is the prompt,
    and the turn with its end is the completion. An answer is so learned from what it is given when it is written, and
    not from what was said later. In formats whose cells cannot hold lists (csv, tsv), the list is written as JSON.
    """

    messages: str = "messages"
    """The column of the messages."""
    tools: str | None = None
    """The column of the tools that the assistant may call; None for none."""
    template: ChatTemplate | None = None
    """The chat template; None for the one of the model that is trained, or the plain one of a new model."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,) if self.tools is None else (self.messages, self.tools)

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        value, *tool_cells = (_parse_json(cell, where, name) for cell, name in zip(values, self.columns, strict=True))
        if not isinstance(value, list):
            raise ValueError(
                f"{where} has {type(value).__name__} in {self.messages!r} where a list of messages is expected"
            )
        messages = parse_messages([_without_nulls(message) for message in value], where)
        tools = parse_tools([_without_nulls(tool) for tool in tool_cells[0]] if any(tool_cells) else None, where)
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            raise ValueError(f"{where} has no message from {ASSISTANT!r}, and so nothing to learn")
        if turns[0] == 0:
            raise ValueError(
                f"{where} begins with a message from {ASSISTANT!r}; a pair needs a prompt and a completion"
            )
        for number, message in enumerate(messages, start=1):
            if message["role"] == ASSISTANT and not message["content"] and "tool_calls" not in message:
                raise ValueError(f"{where} message {number} has no text in 'content'")
            validate_text(message["content"], where, "content")
        return [self._pair(messages[: number + 1], tools, f"{where} message {number + 1}") for number in turns]

    def _pair(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, where: str) -> TextChunk:
        """The prompt and the completion of the last of these messages."""
        template = self.template or named_template("plain")
        try:
            prompt = template.render_guarded(messages[:-1], tools=tools, add_generation_prompt=True)
            text = template.render_guarded(messages, tools=tools)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not text.startswith(prompt) or len(text) == len(prompt):
            raise ValueError(
                f"{where}: the chat template writes other text before an answer that is there than before one that is"
                " to be written, so that it cannot be learned from"
            )
        return TextChunk(text, True, where, len(prompt), template)


def _parse_json(cell: Any, where: str, column: str) -> Any:
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON in {column!r}: {error}") from None


def _without_nulls(value: Any) -> Any:
    """Tables have all fields in all rows, with nulls where a row has none."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


AnyPairFormat: TypeAlias = PromptCompletion | ChatRecord


def read_records(
    handle: BinaryIO, source: str, table_reader: TableReader, record_format: RecordFormat
) -> Iterator[TextChunk]:
    """The documents of a table, one per row."""
    for where, _, values in table_reader(handle, source, [record_format.columns]):
        yield from record_format.to_chunks(values, where)


def _require_text(text: str, where: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{where} has no text in {name}; a pair needs a prompt and a completion")
    return text
