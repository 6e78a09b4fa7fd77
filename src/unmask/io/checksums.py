"""SHA-256 of files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file's contents."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_of_files(root: Path, files: Iterable[Path]) -> str:
    """The SHA-256 of a file, or of the relative paths and contents of a folder's files."""
    total = hashlib.sha256()
    for file in files:
        digest = sha256_of_file(file)
        if file == root:
            return digest
        total.update(f"{file.relative_to(root).as_posix()}\0{digest}\n".encode())
    return total.hexdigest()
