"""One open file to documents: text, lines, FASTA; and what these and tables share.

Everything is streamed: a document comes in pieces, so memory does not grow with a file or a document
(but for a JSON line or a table's cell, which must be read whole). What cannot be text is refused in one
sentence that names the file and the place in it.
"""

from __future__ import annotations

import codecs
import importlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1 << 20
"""Bytes read at a time."""

PIECE = 1 << 18
"""Characters of a piece: what one core encodes at a time, and the least that changes between splits."""

# Where a document is cut, the best place first. After a newline between two written characters and before a
# word, the tokens are the same as without the cut, for all pre-tokenizers in use.
_CUTS = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))

_LINE_END = re.compile(r"\n")
_BEFORE_HEADER = re.compile(r"\n(?=[>;])")


class Piece(NamedTuple):  # which is made three times as fast as a frozen dataclass, and there are billions
    """Part of a document, the last one if `ends`; `origin` says which, for people.

    A pair of a prompt and its answer is one piece, whose first `given` characters are the prompt.
    """

    text: str
    ends: bool
    origin: str
    given: int = 0

    @property
    def parts(self) -> tuple[str, ...]:
        """What is encoded each for itself: the text, or a prompt and its answer."""
        return (self.text[: self.given], self.text[self.given :]) if self.given else (self.text,)


def whole(handle: BinaryIO, origin: str) -> Iterator[Piece]:
    """One document: the file."""
    return pieces(_decoded(handle, origin), origin)


def lines(handle: BinaryIO, origin: str) -> Iterator[Piece]:
    """One document a line; blank lines are none."""
    for number, line in numbered_lines(handle, origin):
        if line.strip():
            yield from document(line, f"{origin} line {number}")


def fasta(handle: BinaryIO, origin: str) -> Iterator[Piece]:
    """One document a record: the sequence in upper case, without its header."""
    for header, group in groupby(_sequences(handle, origin), key=itemgetter(0)):
        yield from pieces((bases for _, bases in group), f"{origin} record of line {header}")


def document(text: str, origin: str) -> Iterable[Piece]:
    """A document that is one text."""
    if len(text) > PIECE:
        return pieces([text], origin)
    return (Piece(text, True, origin),) if text else ()


def pieces(texts: Iterable[str], origin: str) -> Iterator[Piece]:
    """A document that comes as any texts, in pieces of about PIECE characters; none if there is no text."""
    waiting = ""
    for text in texts:
        waiting += text
        start = 0
        while len(waiting) - start > PIECE:  # so that a text is left for the last piece
            stop = cut(waiting, start + PIECE, PIECE // 4)
            yield Piece(waiting[start:stop], False, origin)
            start = stop
        waiting = waiting[start:]
    if waiting:
        yield Piece(waiting, True, origin)


def cut(text: str, near: int, within: int) -> int:
    """Where to cut a text: at most `within` before `near`, after a newline or before a word, else there."""
    for pattern in _CUTS:
        for reach in (within // 256, within // 16, within):  # the last place is looked for, so from near on
            found = deque(pattern.finditer(text, max(0, near - reach), near + 1), maxlen=1)
            if found:
                return found[0].end()
    return near


def numbered_lines(handle: BinaryIO, origin: str) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; only a newline, or carriage return and newline, ends a line."""
    number = 0
    unfinished: list[str] = []
    for text in _decoded(handle, origin):
        first, *others = text.split("\n")
        unfinished.append(first)
        for line in others:
            number += 1
            yield number, "".join(unfinished).removesuffix("\r")
            unfinished = [line]
    last = "".join(unfinished)
    if last:
        yield number + 1, last


def extra(module: str, name: str) -> Any:
    """A module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"this needs the package {package}: pip install 'unmask[{name}]'") from None


def text_of(value: Any, where: str, field: str) -> str:
    """The value of a field: a text or nothing, without what an escape in JSON may bring into it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where} has {type(value).__name__} in {field!r} where a text is expected")
    if "\0" in value:  # which ends documents of bytes
        raise ValueError(f"{where} has a NUL character in its text; a text has none")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where} has {half!r} in its text, which is half a character") from None
    return value


def listed(names: Iterable[object]) -> str:
    """A few names for a sentence."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:8]) + (" and others" if len(shown) > 8 else "") if shown else "none"


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one sentence."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def _sequences(handle: BinaryIO, origin: str) -> Iterator[tuple[int, str]]:
    """Runs of bases, each with the line of its record's header; a line may be as long as a genome."""
    line, header, in_header, new_line = 1, 0, False, True
    for text in _decoded(handle, origin):
        position = 0
        while position < len(text):
            start, opens = position, new_line and text[position] in ">;"
            if opens and text[position] == ">":
                header = line
            in_header = in_header or opens
            found = _LINE_END.search(text, position) if in_header else _BEFORE_HEADER.search(text, position)
            position = found.end() if found else len(text)
            if not in_header:
                bases = "".join(text[start:position].split()).upper()
                if bases and not header:
                    raise ValueError(f"{origin} is not FASTA: line {line} does not start with '>'")
                yield header, bases
            line += text.count("\n", start, position)
            new_line = text[position - 1] == "\n"
            in_header = in_header and not new_line


def _decoded(handle: BinaryIO, origin: str) -> Iterator[str]:
    """The text of a UTF-8 file, without its byte order mark."""
    offset, rest, final = 0, b"", False
    while not final:
        block = handle.read(BLOCK)
        final = not block
        data = rest + block
        nul = data.find(0)
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            nul = error.start if nul < 0 else min(nul, error.start)
            text, used = "", 0
        if nul >= 0:
            raise ValueError(_not_text(origin, offset + nul, data[nul]))
        if offset == 0:
            text = text.removeprefix("\ufeff")
        yield text
        rest, offset = data[used:], offset + used


def _not_text(origin: str, offset: int, byte: int) -> str:
    if byte == 0:
        return f"{origin} is not text: it has a NUL byte at offset {offset}"
    return f"{origin} is not UTF-8: byte 0x{byte:02x} at offset {offset} does not belong there"
