"""JSON texts to records, one at a time: JSON lines, and lists of objects or texts, which may be longer than
memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from unmask.data.readers.text import MAX_RECORD_CHARS, numbered_lines

_Records = Iterator[tuple[str, dict[str, Any] | str]]
"""Where each record stands, for people, and what it is."""

_WHITESPACE = " \t\n\r"
_TAIL_CHARS = 16
"""Characters at the end of what was read that may be part of a word, number or escape."""


def read_json_lines(texts: Iterable[str], source: str) -> _Records:
    """An object a line; blank lines are none."""
    for number, line in numbered_lines(texts, source):
        if line.strip():
            where = f"{source} line {number}"
            yield where, _require_object(_parse_line(line, where), where)


def read_json(texts: Iterable[str], source: str) -> _Records:
    """The items of a list; or JSON lines, which many data sets call .json, too."""
    stream = iter(texts)
    start = ""
    for start in stream:
        if start.strip(_WHITESPACE):
            break
    if start.lstrip(_WHITESPACE).startswith("["):
        return _ListParser(chain([start], stream), source).records()
    return _read_lines_or_raise(chain([start], stream), source)


def _read_lines_or_raise(texts: Iterable[str], source: str) -> _Records:
    begun = False
    try:
        for record in read_json_lines(texts, source):
            begun = True
            yield record
    except ValueError:
        if begun:
            raise
        raise ValueError(
            f'{source} is neither a list of objects or texts, as in [{{"text": "..."}}, ...], nor JSON'
            " lines; write it as one of them, or give it another suffix (.txt) to be read as text"
        ) from None


class _ListParser:
    """A list that is parsed item by item: only one of them is held."""

    def __init__(self, texts: Iterable[str], source: str) -> None:
        self._texts, self._source = iter(texts), source
        self._buffer, self._position, self._index = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode

    def records(self) -> _Records:
        """Each item, which must be an object or a text."""
        self._peek()
        self._position += 1  # the bracket, which the caller has seen
        sign = self._peek()
        while sign != "]" or self._index:
            self._index += 1
            where = f"{self._source} item {self._index}"
            value = self._parse_value(where)
            yield where, value if isinstance(value, str) else _require_object(value, where)
            sign = self._peek()
            if sign == "]":
                break
            if sign != ",":
                found = repr(sign) if sign else "the end"
                raise ValueError(f"{where} is not valid JSON: a comma or ] must follow it; got {found}")
            self._position += 1
            sign = self._peek()
        self._position += 1
        if self._peek():
            raise ValueError(f"{self._source} is not valid JSON: it goes on after the end of its list")

    def _peek(self) -> str:
        """The next character that is not white; empty at the end."""
        while True:
            while self._position < len(self._buffer):
                if self._buffer[self._position] not in _WHITESPACE:
                    return self._buffer[self._position]
                self._position += 1
            if not self._read_more():
                return ""

    def _parse_value(self, where: str) -> Any:
        while True:
            try:
                value, self._position = self._decode(self._buffer, self._position)
                return value
            except RecursionError:
                raise ValueError(f"{where} is not valid JSON: it is nested too deeply") from None
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self._buffer) - _TAIL_CHARS
                if not (cut and self._read_more()):
                    raise ValueError(f"{where} is not valid JSON: {error.msg}") from None

    def _read_more(self) -> bool:
        """Read as much again as is waiting, so that a long item is parsed a few times only."""
        parts, size = [self._buffer[self._position :]], 0
        if len(parts[0]) > MAX_RECORD_CHARS:
            raise ValueError(f"{self._source} item {self._index} has more than {MAX_RECORD_CHARS:,} characters")
        for text in self._texts:
            parts.append(text)
            size += len(text)
            if size > len(parts[0]):
                break
        self._buffer, self._position = "".join(parts), 0
        return size > 0


def _parse_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _require_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold a JSON object; got {type(record).__name__}")
    return record
