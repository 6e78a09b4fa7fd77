"""Folders of classes: FOLDER/CLASS/FILE, a text in each file, as the Genomic Benchmarks and many others are laid out.

Classes and files are read in the order of their names, and not in that of the file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmask.data.readers._text import decode_stream
from unmask.data.readers.files import format_suffix, open_file
from unmask.data.readers.tables import ColumnOptions, first_available_columns, table_readers
from unmask.io.errors import os_errors_as_value_error

TEXT_COLUMNS = ("text", "sentence", "sequence", "seq")
"""Columns that are taken for the text where none is named."""
LABEL_COLUMN = "label"


def class_folders(path: Path) -> list[Path] | None:
    """The folders of the classes, sorted; None if the path is no folder of classes.

    It is one if it has folders with files that are no tables, and no tables itself.
    """
    if not path.is_dir():
        return None
    files, folders = _children(path)
    tables = set(table_readers())
    if any(format_suffix(file)[0] in tables for file in files):
        return None
    firsts = (next(iter(_children(folder)[0]), None) for folder in folders)
    first = next((file for file in firsts if file is not None), None)
    if first is None or format_suffix(first)[0] in tables:
        return None
    if files:
        raise ValueError(f"{path} is a folder of classes, and {files[0].name} in it belongs to none")
    return folders


def read_class_folders(
    folders: list[Path], options: ColumnOptions
) -> Iterator[tuple[str, tuple[str, ...], tuple[Any, ...]]]:
    """A row for each file, as from a table: its path, the selected columns and their values, text and label.

    The text, without the newline at its end, has any of the usual names; the label is the name of the folder.
    """
    columns = first_available_columns(
        options, (*TEXT_COLUMNS, LABEL_COLUMN), f"{folders[0].parent}, a folder of classes,"
    )
    for folder in folders:
        files, inner = _children(folder)
        if inner:
            raise ValueError(f"{inner[0]} is a folder where a file of the class {folder.name!r} is expected")
        if not files:
            raise ValueError(f"{folder} is the folder of a class and holds no files")
        for file in files:
            text = _read_text(file)
            yield str(file), columns, tuple(folder.name if name == LABEL_COLUMN else text for name in columns)


def _read_text(file: Path) -> str:
    if format_suffix(file)[0]:
        raise ValueError(f"{file} is not a file of text; a folder of classes has one text in each file")
    with open_file(file) as handle:
        return "".join(decode_stream(handle, str(file))).removesuffix("\n")


def _children(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files and the folders in a folder that are not hidden, sorted by name."""
    with os_errors_as_value_error(folder, "read"), os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    files = [folder / name for name, is_folder in found if not is_folder]
    return files, [folder / name for name, is_folder in found if is_folder]
