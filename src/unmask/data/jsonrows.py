"""JSON texts to records, one at a time: JSON lines, and lists of objects or texts, which may be longer than
memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from unmask.data.formats import LONGEST_RECORD, numbered_lines

Records = Iterator[tuple[str, dict[str, Any] | str]]
"""Where each record stands, for people, and what it is."""

_WHITE = " \t\n\r"
_TAIL = 16
"""Characters at the end of what was read that may be part of a word, number or escape."""


def json_lines(texts: Iterable[str], origin: str) -> Records:
    """An object a line; blank lines are none."""
    for number, line in numbered_lines(texts, origin):
        if line.strip():
            where = f"{origin} line {number}"
            yield where, _object(_loaded(line, where), where)


def json_file(texts: Iterable[str], origin: str) -> Records:
    """The items of a list; or JSON lines, which many data sets call .json, too."""
    stream = iter(texts)
    start = ""
    for start in stream:
        if start.strip(_WHITE):
            break
    if start.lstrip(_WHITE).startswith("["):
        return _Items(chain([start], stream), origin).records()
    return _lines_or_nothing(chain([start], stream), origin)


def _lines_or_nothing(texts: Iterable[str], origin: str) -> Records:
    begun = False
    try:
        for record in json_lines(texts, origin):
            begun = True
            yield record
    except ValueError:
        if begun:
            raise
        raise ValueError(
            f'{origin} is neither a list of objects or texts, as in [{{"text": "..."}}, ...], nor JSON'
            " lines; write it as one of them, or give it another suffix (.txt) to be read as text"
        ) from None


class _Items:
    """A list that is parsed item by item: only one of them is held."""

    def __init__(self, texts: Iterable[str], origin: str) -> None:
        self._texts, self._origin = iter(texts), origin
        self._waiting, self._place, self._number = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode

    def records(self) -> Records:
        """Each item, which must be an object or a text."""
        self._sign()
        self._place += 1  # the bracket, which the caller has seen
        sign = self._sign()
        while sign != "]" or self._number:
            self._number += 1
            where = f"{self._origin} item {self._number}"
            value = self._value(where)
            yield where, value if isinstance(value, str) else _object(value, where)
            sign = self._sign()
            if sign == "]":
                break
            if sign != ",":
                found = repr(sign) if sign else "the end"
                raise ValueError(f"{where} is not valid JSON: a comma or ] must follow it; got {found}")
            self._place += 1
            sign = self._sign()
        self._place += 1
        if self._sign():
            raise ValueError(f"{self._origin} is not valid JSON: it goes on after the end of its list")

    def _sign(self) -> str:
        """The next character that is not white; empty at the end."""
        while True:
            while self._place < len(self._waiting):
                if self._waiting[self._place] not in _WHITE:
                    return self._waiting[self._place]
                self._place += 1
            if not self._grow():
                return ""

    def _value(self, where: str) -> Any:
        while True:
            try:
                value, self._place = self._decode(self._waiting, self._place)
                return value
            except RecursionError:
                raise ValueError(f"{where} is not valid JSON: it is nested too deeply") from None
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self._waiting) - _TAIL
                if not (cut and self._grow()):
                    raise ValueError(f"{where} is not valid JSON: {error.msg}") from None

    def _grow(self) -> bool:
        """Read as much again as is waiting, so that a long item is parsed a few times only."""
        parts, size = [self._waiting[self._place :]], 0
        if len(parts[0]) > LONGEST_RECORD:
            raise ValueError(
                f"{self._origin} item {self._number} has more than {LONGEST_RECORD:,} characters"
            )
        for text in self._texts:
            parts.append(text)
            size += len(text)
            if size > len(parts[0]):
                break
        self._waiting, self._place = "".join(parts), 0
        return size > 0


def _loaded(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None


def _object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold a JSON object; got {type(record).__name__}")
    return record
