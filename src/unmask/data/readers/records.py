"""What a row of a table is as a document: a text, a prompt and its completion, or a chat.

A pair is one piece however long it is, with the number of its characters that are given: it is encoded in two
parts, so that the border between them is one of tokens, and it is never cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeAlias

from unmask.data.readers.tables import TableReader
from unmask.data.readers.text import TextChunk, chunk_document, validate_text

_ASSISTANT_ROLE = "assistant"
"""The role whose messages are learned."""


class RecordFormat(Protocol):
    """Which columns are needed, and what document their values are."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        ...

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        """The document of a row with these values; `where` it stands is for people."""
        ...


@dataclass(frozen=True)
class TextRecord:
    """A text in a column; a row without one is no document."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        (value,) = values
        return chunk_document(validate_text(value, where, self.column), where)


@dataclass(frozen=True)
class PromptCompletion:
    """Two columns (of JSON lines: fields), a text that is given and one that is to be learned."""

    prompt: str = "prompt"
    completion: str = "completion"

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
    """A column with a list of messages, {"role": ..., "content": ...} each, the last from the assistant.

    That one is the completion, and those before it are the prompt, as `chat_prompt` writes them. Where a column
    cannot hold a list (csv, tsv), it is written as JSON.
    """

    messages: str = "messages"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,)

    def to_chunks(self, values: Sequence[Any], where: str) -> Iterable[TextChunk]:
        (value,) = values
        messages = [
            _parse_message(each, f"{where} message {number}")
            for number, each in enumerate(self._parse_messages(value, where), start=1)
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
            found = type(value).__name__
            raise ValueError(f"{where} has {found} in {self.messages!r} where a list of messages is expected")
        return value


AnyPairFormat: TypeAlias = PromptCompletion | ChatRecord


def read_records(
    handle: BinaryIO, source: str, table_reader: TableReader, record_format: RecordFormat
) -> Iterator[TextChunk]:
    """The documents of a table, a row each."""
    for where, values in table_reader(handle, source, record_format.columns):
        yield from record_format.to_chunks(values, where)


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """The prompt that (role, content) messages are, up to where the assistant's completion begins:

    user:
    Why is the sky blue?

    assistant:
    """
    written = "".join(f"{role}:\n{content}\n\n" for role, content in messages)
    return f"{written}{_ASSISTANT_ROLE}:\n"


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
