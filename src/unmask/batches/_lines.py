"""A file of requests: JSON lines of bounded length, depth and number, each with its line number.

A line that is no JSON object is an error of that line only. A file that is no text at all is refused as a whole.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from unmask.data.readers.files import open_file
from unmask.data.readers.tables import table_readers
from unmask.io.untrusted import parse_json

STDIN = Path("-")
"""Stands for standard input."""
_MAX_LINE_BYTES = 1_000_000
"""As many as the body of a server's request may have."""
_MAX_FILE_BYTES = 1 << 30
"""All requests are in memory at once."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """A line: its number from 1, and the fields of its object, or the sentence that says why there are none."""

    number: int
    fields: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class RequestFile:
    """The lines of a file that are not blank, and the SHA-256 of its contents."""

    name: str
    lines: tuple[Line, ...]
    sha256: str


def read_requests(path: Path) -> RequestFile:
    """The requests in a file, which may be gzipped, or in standard input (`-`)."""
    if path == STDIN:
        return _read(sys.stdin.buffer, "standard input")
    suffix = path.suffix.lower()
    if suffix in table_readers() and suffix not in (".jsonl", ".ndjson"):
        raise ValueError(f'{path} must hold requests as JSON lines, one object per line, as in {{"text": "..."}}')
    with open_file(path) as file:
        return _read(file, str(path))


def _read(file: BinaryIO, name: str) -> RequestFile:
    digest, lines, size = hashlib.sha256(), list[Line](), 0
    for number, (content, is_whole) in enumerate(_split(file, digest), start=1):
        size += len(content)
        if size > _MAX_FILE_BYTES:
            raise ValueError(f"{name} has more than {_MAX_FILE_BYTES:,} bytes: divide it into several files")
        if b"\0" in content:
            raise ValueError(f"{name} is not a text file of JSON lines: line {number} has a NUL byte")
        if not is_whole:
            error = f"the line has more than {_MAX_LINE_BYTES:,} bytes"
            lines.append(Line(number, {}, error))
        elif content.strip():
            lines.append(_parse(number, content))
    if not lines:
        raise ValueError(f"{name} is empty: it must have a request on each line")
    return RequestFile(name, tuple(lines), digest.hexdigest())


def _split(file: BinaryIO, digest: hashlib._Hash) -> Iterator[tuple[bytes, bool]]:
    """Each line, or the beginning of a line that is too long, and whether it is whole."""
    first = True
    while content := file.readline(_MAX_LINE_BYTES + 1):
        digest.update(content)
        is_whole = len(content) <= _MAX_LINE_BYTES
        rest = content
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            digest.update(rest)
        yield content.removeprefix(_BOM) if first else content, is_whole
        first = False


def _parse(number: int, content: bytes) -> Line:
    try:
        data = parse_json(content, "the line")
        if b"\\ud" in content.lower():  # an escape may be half of a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Line(number, {}, "the line has half a surrogate pair, which is no character")
    except ValueError as error:
        return Line(number, {}, re.sub(r": line 1 (column \d+) \(char \d+\)$", r" at \1", str(error)))
    if not isinstance(data, dict):
        return Line(number, {}, f"the line must hold a JSON object; got {type(data).__name__}")
    return Line(number, data)
