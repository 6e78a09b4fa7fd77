"""One open file to documents: text and lines; and what these, sequences and tables share.

Everything is streamed: a document comes in pieces, so memory does not grow with a file or a document
(but for a JSON line or a table's cell, which must be read whole). What cannot be text is refused in one
sentence that names the file and the place in it. Lines that end in carriage return and newline are read as
if they ended in a newline, and a byte order mark is left out.
"""

from __future__ import annotations

import codecs
import importlib
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

_READ_BYTES = 1 << 20
"""Bytes read at a time."""

MAX_RECORD_CHARS = 1 << 28
"""Characters of a JSON line, a JSON item or a table's line: more is refused before it fills the memory."""

DEFAULT_ENCODING = "utf-8"

CHUNK_CHARS = 1 << 18
"""Characters of a piece: what one core encodes at a time, and the least that changes between splits."""

# Where a document is cut, the best place first. After a newline between two written characters and before a
# word, the tokens are the same as without the cut, for all pre-tokenizers in use.
_SPLIT_PATTERNS = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))


class TextChunk(NamedTuple):  # which is made three times as fast as a frozen dataclass, and there are billions
    """Part of a document, the last one if `ends`; `origin` says which, for people.

    A pair of a prompt and its completion is one piece, whose first `given` characters are the prompt.
    """

    text: str
    is_last: bool
    source: str
    prompt_chars: int = 0

    @property
    def segments(self) -> tuple[str, ...]:
        """What is encoded each for itself: the text, or a prompt and its completion."""
        return (self.text[: self.prompt_chars], self.text[self.prompt_chars :]) if self.prompt_chars else (self.text,)


def read_text(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document: the file."""
    return chunk_text(decode_stream(handle, source, encoding), source)


def read_lines(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document a line; blank lines are none."""
    for number, line in numbered_lines(decode_stream(handle, source, encoding)):
        if line.strip():
            yield from chunk_document(line, f"{source} line {number}")


def chunk_document(text: str, source: str) -> Iterable[TextChunk]:
    """A document that is one text."""
    if len(text) > CHUNK_CHARS:
        return chunk_text([text], source)
    return (TextChunk(text, True, source),) if text else ()


def chunk_text(texts: Iterable[str], source: str) -> Iterator[TextChunk]:
    """A document that comes as any texts, in pieces of about PIECE characters; none if there is no text."""
    waiting = ""
    for text in texts:
        waiting += text
        start = 0
        while len(waiting) - start > CHUNK_CHARS:  # so that a text is left for the last piece
            stop = split_point(waiting, start + CHUNK_CHARS, CHUNK_CHARS // 4)
            yield TextChunk(waiting[start:stop], False, source)
            start = stop
        waiting = waiting[start:]
    if waiting:
        yield TextChunk(waiting, True, source)


def split_point(text: str, target: int, max_distance: int) -> int:
    """Where to cut a text: at most `within` before `near`, after a newline or before a word, else there."""
    for pattern in _SPLIT_PATTERNS:
        for reach in (
            max_distance // 256,
            max_distance // 16,
            max_distance,
        ):  # the last place is looked for, so from near on
            found = deque(pattern.finditer(text, max(0, target - reach), target + 1), maxlen=1)
            if found:
                return found[0].end()
    return target


def numbered_lines(texts: Iterable[str], source: str = "") -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends, of a text that comes in parts; only a newline ends a line.

    If they are records of `origin`, one of more than LONGEST_RECORD characters is refused.
    """
    number = size = 0
    unfinished: list[str] = []
    for text in texts:
        first, *others = text.split("\n")
        unfinished.append(first)
        size += len(first)
        if source and size > MAX_RECORD_CHARS:
            raise ValueError(f"{source} line {number + 1} has more than {MAX_RECORD_CHARS:,} characters")
        for line in others:
            number += 1
            yield number, "".join(unfinished)
            unfinished, size = [line], len(line)
    last = "".join(unfinished)
    if last:
        yield number + 1, last


def import_optional(module: str, extra: str) -> Any:
    """A module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"this needs the package {package}: pip install 'unmask[{extra}]'") from None


def validate_text(value: Any, where: str, field: str) -> str:
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


def format_names(names: Iterable[object]) -> str:
    """A few names for a sentence."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:8]) + (" and others" if len(shown) > 8 else "") if shown else "none"


def short_error(error: BaseException) -> str:
    """What an error says, short enough for one sentence."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def validate_encoding(name: str) -> None:
    """Refuse what is not the name of an encoding of text."""
    try:
        known = codecs.lookup(name)
        b"a".decode(name, "replace")  # which refuses those that are not of text, such as base64
    except (LookupError, ValueError):
        raise ValueError(
            f"there is no encoding {name!r}; others than {DEFAULT_ENCODING} are latin-1, cp1252, utf-16 and so on"
        ) from None
    if known.incrementaldecoder is None:
        raise ValueError(f"the encoding {name!r} cannot be read in parts; choose another one")


def decode_stream(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[str]:
    """The text of a file, without its byte order mark and carriage returns before newlines."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, waiting, begun, final = 0, "", False, False
    while not final:
        block = handle.read(_READ_BYTES)
        final = not block
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final)
        except UnicodeDecodeError as error:
            raise ValueError(_decode_error(source, offset - pending, error, encoding)) from None
        if "\0" in text:
            before = len(text[: text.index("\0")].encode(encoding, "replace"))
            raise ValueError(f"{source} is not text: it has a NUL byte at offset {offset - pending + before}")
        offset += len(block)
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        text, waiting = waiting + text, ""
        if not final and text.endswith("\r"):  # what follows may be a newline
            text, waiting = text[:-1], "\r"
        yield text.replace("\r\n", "\n") if "\r" in text else text


def _decode_error(source: str, start: int, error: UnicodeDecodeError, encoding: str) -> str:
    """Why bytes from the offset `start` on are no text."""
    data, place = error.object, error.start
    nul = data.find(0, 0, place) if codecs.lookup(encoding).name == DEFAULT_ENCODING else -1
    if nul >= 0:
        return f"{source} is not text: it has a NUL byte at offset {start + nul}"
    name = "UTF-8" if codecs.lookup(encoding).name == DEFAULT_ENCODING else encoding
    marked = start == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    other = "utf-16" if marked else "latin-1" if name == "UTF-8" else DEFAULT_ENCODING
    return (
        f"{source} is not {name}: byte 0x{data[place]:02x} at offset {start + place} does not belong there"
        f" (if it is text in another encoding, name that, as in --encoding {other})"
    )
