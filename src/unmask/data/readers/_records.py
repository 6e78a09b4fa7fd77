"""Documents from rows of a table: a text, a prompt and its completion, or a chat.

A prompt-completion pair is one chunk of any length, with the length of its prompt. Prompt and completion are
encoded separately, so that no token spans both, and a pair is never split.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeAlias

from unmask.data.readers._text import TextChunk, chunk_document, validate_text
from unmask.data.readers.tables import TableReader

_ASSISTANT_ROLE = "assistant"
"""The role whose messages are completions."""


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
    """A column with a list of messages {"role": ..., "content": ...}, the last one from the assistant.

    The last message is the completion, and the others are the prompt, formatted by `render_chat`. In formats
    whose cells cannot hold lists (csv, tsv), the list is written as JSON.
    """

    messages: str = "messages"
    """The column of the messages."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,)

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        (value,) = values
        messages = [
            _parse_message(message, f"{where} message {number}")
            for number, message in enumerate(self._parse_messages(value, where), start=1)
        ]
        if len(messages) < 2:
            raise ValueError(f"{where} has {len(messages)} messages; a pair needs a prompt and a completion")
        role, completion = messages.pop()
        if role != _ASSISTANT_ROLE:
            raise ValueError(f"{where} ends with a message from {role!r}; the last must be from {_ASSISTANT_ROLE!r}")
        prompt = render_chat(messages)
        return (TextChunk(prompt + completion, True, where, len(prompt)),)

    def _parse_messages(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not valid JSON in {self.messages!r}: {error}") from None
        if not isinstance(value, list):
            raise ValueError(
                f"{where} has {type(value).__name__} in {self.messages!r} where a list of messages is expected"
            )
        return value


AnyPairFormat: TypeAlias = PromptCompletion | ChatRecord


def read_records(
    handle: BinaryIO, source: str, table_reader: TableReader, record_format: RecordFormat
) -> Iterator[TextChunk]:
    """The documents of a table, one per row."""
    for where, _, values in table_reader(handle, source, [record_format.columns]):
        yield from record_format.to_chunks(values, where)


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """The prompt made of (role, content) messages, up to where the assistant's completion begins:

    user:
    Why is the sky blue?

    assistant:
    """
    prompt = "".join(f"{role}:\n{content}\n\n" for role, content in messages)
    return f"{prompt}{_ASSISTANT_ROLE}:\n"


def _parse_message(value: Any, where: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with role and content; got {type(value).__name__}")
    role, content = (
        _require_text(validate_text(value.get(name), where, name), where, repr(name)) for name in ("role", "content")
    )
    return role, content


def _require_text(text: str, where: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{where} has no text in {name}; a pair needs a prompt and a completion")
    return text
