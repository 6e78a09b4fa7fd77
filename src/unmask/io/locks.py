"""Locks of files and folders, released when the process ends."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_LOCK_FILE = ".lock"
"""The locked file in a folder; it names the process that holds the lock."""


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Wait until no other process holds the lock of `path`; False if the file system has no locks."""
    _make_parents(path.parent)
    lock = path.with_name(f".{path.name}.lock")
    handle = _acquire_lock(lock)
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)  # while it is locked: waiting processes notice
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder until the end of the block or of the process; raises if another process holds the lock."""
    lock = folder / _LOCK_FILE
    try:
        handle = _acquire_lock(lock, wait=False)
    except BlockingIOError:
        raise ValueError(
            f"{folder} is in use by {_lock_holder(lock)}; wait until it is done, or choose another folder"
        ) from None
    if handle is None:
        yield
        return
    try:
        with suppress(OSError):  # a full disk does not matter to the lock
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _make_parents(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _acquire_lock(lock: Path, wait: bool = True) -> int | None:
    """The handle of the locked file; None if there are no locks. Without `wait`, raises BlockingIOError."""
    if sys.platform == "win32":
        return None
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(handle, lock):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # some network file systems have no locks
            os.close(handle)
            return None
        os.close(handle)


def _lock_holder(lock: Path) -> str:
    """The process that is named in the lock file."""
    try:
        return lock.read_text(encoding="utf-8", errors="replace") or "another process"
    except OSError:
        return "another process"


def _is_same_file(handle: int, path: Path) -> bool:
    """Whether the open file still has this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
