"""Files on disk: finding those of a path, their format, and opening them."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from unmask.data.readers.config import SourceConfig
from unmask.data.readers.tables import SEEKABLE_SUFFIXES
from unmask.io.errors import os_errors_as_value_error


def list_files(root: Path, keep: Callable[[str], bool]) -> list[Path]:
    """The files below a folder, sorted by their relative path; `keep` filters names of files and folders."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = filter(keep, subfolders)
        files.extend(Path(folder, name) for name in filter(keep, names))
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def format_suffix(file: Path) -> tuple[str, bool]:
    """The suffix that selects a reader (empty for text), and whether the file is gzipped."""
    gzipped = file.suffix.lower() == ".gz"
    suffix = (file.with_suffix("") if gzipped else file).suffix.lower()
    return suffix if suffix in _known_suffixes() else "", gzipped


@contextmanager
def open_file(file: Path) -> Iterator[BinaryIO]:
    """The contents of a file, unzipped; errors while they are read become one sentence."""
    suffix, gzipped = format_suffix(file)
    with os_errors_as_value_error(file, "read"), gzip.open(file) if gzipped else file.open("rb") as plain:
        if not (gzipped and suffix in SEEKABLE_SUFFIXES):
            yield cast(BinaryIO, plain)
            return
        with tempfile.TemporaryFile() as unzipped:
            shutil.copyfileobj(plain, unzipped)
            unzipped.seek(0)
            yield cast(BinaryIO, unzipped)


@cache
def _known_suffixes() -> frozenset[str]:
    return frozenset(SourceConfig().readers_by_suffix())


def _raise(error: OSError) -> NoReturn:
    raise error
