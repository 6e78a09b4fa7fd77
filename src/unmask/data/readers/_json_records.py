"""Records from JSON, one at a time: JSON lines, and lists of objects or texts that may not fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from unmask.data.readers._text import MAX_RECORD_CHARS, numbered_lines

_Records = Iterator[tuple[str, dict[str, Any] | str]]
"""The location of each record (for error messages), and the record."""

_WHITESPACE = " \t\n\r"
_TAIL_CHARS = 16
"""Characters at the end of the buffer that may be part of an unfinished word, number or escape."""


def _read_json_lines(texts: Iterable[str], source: str) -> _Records:
    """One object per line; blank lines are skipped."""
    for number, line in numbered_lines(texts, source):
        if line.strip():
            where = f"{source} line {number}"
            yield where, _require_object(_parse_line(line, where), where)


def _read_json(texts: Iterable[str], source: str) -> _Records:
    """The items of a list, or JSON lines, which many datasets also call .json."""
    stream = iter(texts)
    start = ""
    for start in stream:
        if start.strip(_WHITESPACE):
            break
    if start.lstrip(_WHITESPACE).startswith("["):
        return _ListParser(chain([start], stream), source).records()
    return _read_lines_or_raise(chain([start], stream), source)


def _read_lines_or_raise(texts: Iterable[str], source: str) -> _Records:
    started = False
    try:
        for record in _read_json_lines(texts, source):
            started = True
            yield record
    except ValueError:
        if started:
            raise
        raise ValueError(
            f'{source} is neither a list of objects or texts, as in [{{"text": "..."}}, ...], nor JSON'
            " lines; write it as one of them, or give it another suffix (.txt) to be read as text"
        ) from None


class _ListParser:
    """Parses a list item by item; only one item is in memory."""

    def __init__(self, texts: Iterable[str], source: str) -> None:
        self._texts, self._source = iter(texts), source
        self._buffer, self._position, self._index = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode

    def records(self) -> _Records:
        """The items, each an object or a text."""
        self._peek()
        self._position += 1  # the opening bracket
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
                next_text = repr(sign) if sign else "the end"
                raise ValueError(f"{where} is not valid JSON: a comma or ] must follow it; got {next_text}")
            self._position += 1
            sign = self._peek()
        self._position += 1
        if self._peek():
            raise ValueError(f"{self._source} is not valid JSON: there is text after the end of its list")

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
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
                incomplete = error.msg.startswith("Unterminated") or error.pos > len(self._buffer) - _TAIL_CHARS
                if not (incomplete and self._read_more()):
                    raise ValueError(f"{where} is not valid JSON: {error.msg}") from None

    def _read_more(self) -> bool:
        """Double the buffer, so that a long item is parsed only a few times; False at the end."""
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


JSON_READERS = {".json": _read_json, ".jsonl": _read_json_lines, ".ndjson": _read_json_lines}
"""The reader of each JSON format, by suffix."""


def _parse_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _require_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold a JSON object; got {type(record).__name__}")
    return record
