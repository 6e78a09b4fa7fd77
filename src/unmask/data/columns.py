"""What a row of a table is as a document: a text, a prompt and its answer, or a chat.

A pair is one piece however long it is, with the number of its characters that are given: it is encoded in two
parts, so that the border between them is one of tokens, and it is never cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeAlias

from unmask.data.formats import Piece, document, text_of
from unmask.data.tables import Table

ASSISTANT = "assistant"
"""The role whose messages are learned."""


class RowReading(Protocol):
    """Which columns are needed, and what document their values are."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are read."""
        ...

    def pieces(self, values: Sequence[Any], where: str) -> Iterable[Piece]:
        """The document of a row with these values; `where` it stands is for people."""
        ...


@dataclass(frozen=True)
class OneText:
    """A text in a column; a row without one is no document."""

    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def pieces(self, values: Sequence[Any], where: str) -> Iterable[Piece]:
        (value,) = values
        return document(text_of(value, where, self.column), where)


@dataclass(frozen=True)
class PromptAnswer:
    """Two columns (of JSON lines: fields), a text that is given and one that is to be learned."""

    prompt: str = "prompt"
    answer: str = "answer"

    def __post_init__(self) -> None:
        if self.prompt == self.answer:
            raise ValueError(f"prompt and answer must be two columns; got {self.prompt!r} for both")

    @property
    def columns(self) -> tuple[str, ...]:
        return self.prompt, self.answer

    def pieces(self, values: Sequence[Any], where: str) -> Iterable[Piece]:
        prompt, answer = (
            _some_text(text_of(value, where, name), where, repr(name))
            for name, value in zip(self.columns, values, strict=True)
        )
        return (Piece(prompt + answer, True, where, len(prompt)),)


@dataclass(frozen=True)
class Chat:
    """A column with a list of messages, {"role": ..., "content": ...} each, the last from the assistant.

    That one is the answer, and those before it are the prompt, as `chat_prompt` writes them. Where a column
    cannot hold a list (csv, tsv), it is written as JSON.
    """

    messages: str = "messages"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.messages,)

    def pieces(self, values: Sequence[Any], where: str) -> Iterable[Piece]:
        (value,) = values
        messages = [
            _message(each, f"{where} message {number}")
            for number, each in enumerate(self._list(value, where), start=1)
        ]
        if len(messages) < 2:
            raise ValueError(f"{where} has {len(messages)} messages; a pair needs a prompt and an answer")
        role, answer = messages.pop()
        if role != ASSISTANT:
            raise ValueError(
                f"{where} ends with a message from {role!r}; the last must be from {ASSISTANT!r}"
            )
        prompt = chat_prompt(messages)
        return (Piece(prompt + answer, True, where, len(prompt)),)

    def _list(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not valid JSON in {self.messages!r}: {error}") from None
        if not isinstance(value, list):
            found = type(value).__name__
            raise ValueError(f"{where} has {found} in {self.messages!r} where a list of messages is expected")
        return value


AnyPairs: TypeAlias = PromptAnswer | Chat


def documents_of(handle: BinaryIO, origin: str, table: Table, reading: RowReading) -> Iterator[Piece]:
    """The documents of a table, a row each."""
    for where, values in table(handle, origin, reading.columns):
        yield from reading.pieces(values, where)


def chat_prompt(messages: Iterable[tuple[str, str]]) -> str:
    """The prompt that (role, content) messages are, up to where the assistant's answer begins:

    user:
    Why is the sky blue?

    assistant:
    """
    written = "".join(f"{role}:\n{content}\n\n" for role, content in messages)
    return f"{written}{ASSISTANT}:\n"


def _message(value: Any, where: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with role and content; got {type(value).__name__}")
    role, content = (
        _some_text(text_of(value.get(name), where, name), where, repr(name)) for name in ("role", "content")
    )
    return role, content


def _some_text(text: str, where: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{where} has no text in {name}; a pair needs a prompt and an answer")
    return text
