"""Atomic replacement of files and folders: complete or not at all, even if the process is killed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OLD_SUFFIX = "-old"


@contextmanager
def atomic_folder(path: Path, locked: bool) -> Iterator[Path]:
    """A temporary folder next to `path` that replaces it at the end; after an error it is removed.

    If this process holds the lock (`locked`, see `file_lock`), temporary folders of killed processes are
    removed, and an old folder that such a process had moved away is restored first.
    """
    prefix = f".{path.name}.tmp-"
    if locked:
        _remove_leftovers(path, prefix)
    tmp = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    old = tmp.with_name(tmp.name + _OLD_SUFFIX)
    try:
        tmp.chmod(0o755)  # mkdtemp gives access to the owner only
        yield tmp
        for entry in [*tmp.iterdir(), tmp]:
            fsync(entry)
        if path.exists():
            path.rename(old)
        tmp.rename(path)
        fsync(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary file next to `path` that replaces it at the end; after an error it is removed."""
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        yield tmp
        fsync(tmp)
        tmp.replace(path)
        fsync(path.parent)
    finally:
        tmp.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Replace a file by this data, in a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def fsync(path: Path) -> None:
    """Write a file or folder through to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path, prefix: str) -> None:
    for entry in [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix)]:
        if entry.name.endswith(_OLD_SUFFIX) and not path.exists():
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)
