"""A folder appears whole or not at all, whatever happens to the process that writes it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_OLD_SUFFIX = "-old"
_LOCK_FILE = ".lock"
"""The file in a folder whose lock says that somebody works there; who, is written in it."""


@contextmanager
def file_lock(path: Path) -> Iterator[bool]:
    """Wait until no other process writes `path`; False where the file system cannot tell."""
    _make_parents(path.parent)
    lock = path.with_name(f".{path.name}.lock")
    handle = _acquire_lock(lock)
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)  # while it is held: who waits for it will see that it is gone
        os.close(handle)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep all others out of a folder: until the end of the block or of the process, however it ends."""
    lock = folder / _LOCK_FILE
    try:
        handle = _acquire_lock(lock, wait=False)
    except BlockingIOError:
        raise ValueError(
            f"{folder} is in use by {_lock_holder(lock)}; wait until it is done, or take another folder"
        ) from None
    if handle is None:
        yield
        return
    try:
        with suppress(OSError):  # a disk that is full; the lock holds all the same
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def atomic_folder(path: Path, locked: bool) -> Iterator[Path]:
    """A fresh folder beside `path` that takes its place at the end; after an error nothing is left of it.

    What earlier runs left when they were killed is removed if this one is `alone` (see `exclusive`); the old
    folder, if one was killed just when it had moved it away, comes back first.
    """
    prefix = f".{path.name}.tmp-"
    if locked:
        _remove_leftovers(path, prefix)
    fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    old = fresh.with_name(fresh.name + _OLD_SUFFIX)
    try:
        fresh.chmod(0o755)  # mkdtemp makes it for the owner only
        yield fresh
        for entry in [*fresh.iterdir(), fresh]:
            fsync(entry)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        fsync(path.parent)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A fresh file beside `path` that takes its place at the end, if there was no error."""
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        yield fresh
        fsync(fresh)
        fresh.replace(path)
        fsync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path, prefix: str) -> None:
    left = [entry for entry in path.parent.iterdir() if entry.name.startswith(prefix)]
    for entry in left:
        if entry.name.endswith(_OLD_SUFFIX) and not path.exists():
            entry.rename(path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _make_parents(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def _acquire_lock(lock: Path, wait: bool = True) -> int | None:
    """The handle of the locked file, None where there are no locks; who will not wait may be told so."""
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
    """Who has written into the lock that it is theirs."""
    try:
        return lock.read_text(encoding="utf-8", errors="replace") or "another process"
    except OSError:
        return "another process"


def _is_same_file(handle: int, path: Path) -> bool:
    """Whether the file behind the handle still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
