"""Documents from an open file of text or lines, and what all readers share: decoding, chunks, lines.

Everything is streamed: a document is read in chunks, so memory does not grow with a file or a document
(except for a JSON line or a table cell, which are read whole). Bytes that are not text raise one sentence that
names the file and the offset. CRLF is read as a newline, and a byte order mark is dropped.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from unmask.data.chat import ChatTemplate

_READ_BYTES = 1 << 20
"""Bytes per read."""

MAX_RECORD_CHARS = 1 << 28
"""The longest JSON line, JSON item or table line; longer ones raise before they fill the memory."""

DEFAULT_ENCODING = "utf-8"

CHUNK_CHARS = 1 << 18
"""Characters of a chunk: the unit of encoding, and of moving text between splits."""

# Where a document is split into chunks, the preferred pattern first. After a newline between two non-space
# characters and before a word, all pre-tokenizers in use give the same tokens as without the split.
_SPLIT_PATTERNS = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n(?=\S)"), re.compile(r"(?<=\S)(?= \S)"))


class TextChunk(NamedTuple):  # three times as fast to construct as a frozen dataclass, and there are billions
    """Part of a document; `is_last` on its last chunk. `source` names the document in error messages.

    A prompt-completion pair is one chunk whose first `prompt_chars` characters are the prompt. The text of a
    conversation is that of its `template`, with guards, and is encoded by it.
    """

    text: str
    is_last: bool
    source: str
    prompt_chars: int = 0
    template: ChatTemplate | None = None

    @property
    def segments(self) -> tuple[str, ...]:
        """The texts that are encoded separately: the whole text, or a prompt and its completion."""
        return (self.text[: self.prompt_chars], self.text[self.prompt_chars :]) if self.prompt_chars else (self.text,)


def read_text(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document: the whole file."""
    return chunk_text(decode_stream(handle, source, encoding), source)


def read_lines(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document per line; blank lines are skipped."""
    for number, line in numbered_lines(decode_stream(handle, source, encoding)):
        if line.strip():
            yield from chunk_document(line, f"{source} line {number}")


def chunk_document(text: str, source: str) -> Iterable[TextChunk]:
    """The chunks of a document given as one text; none if it is empty."""
    if len(text) > CHUNK_CHARS:
        return chunk_text([text], source)
    return (TextChunk(text, True, source),) if text else ()


def chunk_text(texts: Iterable[str], source: str, size: int | None = None) -> Iterator[TextChunk]:
    """The chunks, of about `size` (CHUNK_CHARS) characters, of a document given in parts; none if it is empty."""
    waiting, size = "", size or CHUNK_CHARS
    for text in texts:
        waiting += text
        start = 0
        while len(waiting) - start > size:  # so that the last chunk is not empty
            stop = split_point(waiting, start + size, size // 4)
            yield TextChunk(waiting[start:stop], False, source)
            start = stop
        waiting = waiting[start:]
    if waiting:
        yield TextChunk(waiting, True, source)


def split_point(text: str, target: int, max_distance: int) -> int:
    """Where to split a text: at most `max_distance` before `target`, after a newline or before a word; else at
    `target`."""
    for pattern in _SPLIT_PATTERNS:
        for reach in (max_distance // 256, max_distance // 16, max_distance):  # the last match is searched for
            last_match = deque(pattern.finditer(text, max(0, target - reach), target + 1), maxlen=1)
            if last_match:
                return last_match[0].end()
    return target


def numbered_lines(texts: Iterable[str], source: str = "") -> Iterator[tuple[int, str]]:
    """Numbered lines, without line ends, of a text given in parts; only a newline ends a line.

    If `source` is given, a line of more than MAX_RECORD_CHARS characters raises.
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


def validate_text(value: Any, where: str, field: str) -> str:
    """The text in a field (None is empty), without NUL and lone surrogates, which JSON escapes can produce."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where} has {type(value).__name__} in {field!r} where a text is expected")
    if "\0" in value:  # NUL ends documents of the byte tokenizer
        raise ValueError(f"{where} has a NUL character in its text; remove it")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where} has {half!r} in its text, which is half a surrogate pair") from None
    return value


def format_names(names: Iterable[object]) -> str:
    """At most eight names, for an error message."""
    shown = [repr(name) for name in names]
    return ", ".join(shown[:8]) + (" and others" if len(shown) > 8 else "") if shown else "none"


def validate_encoding(name: str) -> None:
    """Raise if there is no such text encoding."""
    try:
        known = codecs.lookup(name)
        b"a".decode(name, "replace")  # raises for codecs that are not of text, such as base64
    except (LookupError, ValueError):
        raise ValueError(
            f"there is no encoding {name!r}; examples are {DEFAULT_ENCODING}, latin-1, cp1252 and utf-16"
        ) from None
    if known.incrementaldecoder is None:
        raise ValueError(f"the encoding {name!r} cannot be read in parts; choose another one")


def decode_stream(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[str]:
    """The decoded text of a file, without byte order mark and with CRLF as newlines."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, waiting, started, final = 0, "", False, False
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
        if not started and text:
            text, started = text.removeprefix("\ufeff"), True
        text, waiting = waiting + text, ""
        if not final and text.endswith("\r"):  # a newline may follow
            text, waiting = text[:-1], "\r"
        yield text.replace("\r\n", "\n") if "\r" in text else text


def _decode_error(source: str, start: int, error: UnicodeDecodeError, encoding: str) -> str:
    """Why the bytes from the offset `start` on are not text."""
    data, position = error.object, error.start
    nul = data.find(0, 0, position) if codecs.lookup(encoding).name == DEFAULT_ENCODING else -1
    if nul >= 0:
        return f"{source} is not text: it has a NUL byte at offset {start + nul}"
    name = "UTF-8" if codecs.lookup(encoding).name == DEFAULT_ENCODING else encoding
    has_utf16_mark = start == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    other = "utf-16" if has_utf16_mark else "latin-1" if name == "UTF-8" else DEFAULT_ENCODING
    return (
        f"{source} is not {name}: byte 0x{data[position]:02x} at offset {start + position} does not belong there"
        f" (if it is text in another encoding, name that, as in --encoding {other})"
    )
