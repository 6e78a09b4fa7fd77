"""Files from untrusted sources: regular files only, of bounded size, and JSON of bounded depth.

Devices, pipes and sockets, and links to them, raise without being read: they may be endless or block.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 << 20
"""The largest JSON file. The longest index of published weights has nine million bytes."""

_MAX_JSON_DEPTH = 64
"""The deepest nesting of objects and lists."""


def require_regular_file(file: Path) -> os.stat_result:
    """Raise unless it is a regular file or a link to one; it is not opened."""
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ValueError(f"{file.parent} is incomplete: {file.name} is missing") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    _raise_unless_regular(file, status)
    return status


def read_bytes(file: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The contents of a regular file of at most `max_bytes` bytes."""
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block forever.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ValueError(f"{file.parent} is incomplete: {file.name} is missing") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(handle)
        _raise_unless_regular(file, status)
        data = _read_fd(handle, max_bytes + 1) if status.st_size <= max_bytes else None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)
    if data is None or len(data) > max_bytes:
        raise ValueError(f"{file} has more than {max_bytes:,} bytes, which is more than any such file needs")
    return data


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON in a regular file of bounded size."""
    return parse_json(read_bytes(file, max_bytes), str(file))


def read_json_object(file: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a regular file of bounded size."""
    data = read_json(file, max_bytes)
    if not isinstance(data, dict):
        raise ValueError(f"{file} must hold a JSON object; got {type(data).__name__}")
    return data


def parse_json(text: bytes, where: str) -> Any:
    """JSON from bytes; `where` they are from, for error messages."""
    try:
        data = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if text.count(b"[") + text.count(b"{") > _MAX_JSON_DEPTH:
        _check_depth(data, where)
    return data


def _read_fd(fd: int, max_bytes: int) -> bytes:
    """At most `max_bytes` bytes; files in /proc report no size."""
    parts, left = [], max_bytes
    while left and (part := os.read(fd, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _raise_unless_regular(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{file} is not a plain file, but {_file_type(status.st_mode)}")


def _file_type(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _check_depth(data: Any, where: str) -> None:
    level = [data]
    for _ in range(_MAX_JSON_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"{where} is nested too deeply: {_MAX_JSON_DEPTH} levels are enough for any such file")
