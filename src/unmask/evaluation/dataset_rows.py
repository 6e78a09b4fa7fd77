"""The rows of a text set, from lines, tables or the hub.

A row without text is part of a set, as it is not of a corpus: the end of a blank line counts as a word. Hence
these readers, beside those of `unmask.data.readers.text`, which leave such rows out. All is streamed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from unmask.data import sources
from unmask.data.readers import text as formats
from unmask.data.sources import SourceConfig
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session

_Row: TypeAlias = dict[str, Any]

ColumnOptions: TypeAlias = tuple[tuple[str, ...], ...]
"""Alternatives, the best first: the columns that make up the text, joined by a space."""


def read_lines(file: Path) -> Iterator[str]:
    """All lines of a text file, without their ends."""
    waiting = ""
    for piece in sources.read_documents([str(file)], SourceConfig()):
        *ended, waiting = (waiting + piece.text).split("\n")
        yield from (line.removesuffix("\r") for line in ended)
    if waiting:
        yield waiting


def row_texts(rows: Iterable[_Row], columns: ColumnOptions, source: str) -> Iterator[str]:
    """The text of each row of a table."""
    for number, row in enumerate(rows, start=1):
        where = f"{source} row {number}"
        names = next((names for names in columns if row.keys() >= set(names)), None)
        if names is None:
            wanted = " or ".join(" and ".join(map(repr, names)) for names in columns)
            raise ValueError(f"{where} has no column {wanted}; it has {formats.format_names(row)}")
        yield " ".join(formats.validate_text(row[name], where, name) for name in names)


def _read_jsonl(file: Path) -> Iterator[_Row]:
    """A JSON object a line."""
    with _io_errors_as_value_error(file), file.open(encoding="utf-8-sig", newline="\n") as handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON, {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} must hold a JSON object; got {type(row).__name__}")
            yield row


def _read_csv(file: Path) -> Iterator[_Row]:
    """A row a line; without a header, that is if the first cell is a number, columns are '1', '2', ..."""
    csv.field_size_limit(2**31 - 1)  # the library refuses texts of more than 128 kB
    with _io_errors_as_value_error(file), file.open(encoding="utf-8-sig", newline="") as handle:
        header: list[str] = []
        cells = csv.reader(handle, strict=True)
        for row in filter(None, cells):
            if not header:
                titled = not row[0].isdecimal()
                header = row if titled else [str(number) for number in range(1, len(row) + 1)]
                if titled:
                    continue
            if len(row) != len(header):
                raise ValueError(f"line {cells.line_num} has {len(row)} columns and not {len(header)}")
            yield dict(zip(header, row, strict=True))


def _read_parquet(file: Path) -> Iterator[_Row]:
    """The rows of a parquet file."""
    library: Any = formats.import_optional("pyarrow.parquet", "parquet")
    with _io_errors_as_value_error(file), library.ParquetFile(file, pre_buffer=False) as opened:
        for batch in opened.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterator[_Row]:
    """The rows of a data set that the package `datasets` loads: of the hub, or in a local folder."""
    library: Any = formats.import_optional("datasets", "hub")
    with _io_errors_as_value_error(f"the data set {name}"), hub_session(name) as online:
        if not online:
            raise ValueError(UNREACHABLE_MESSAGE)
        yield from library.load_dataset(name, config, split=split, revision=revision, streaming=True)


TABLE_READERS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Files that are tables, by suffix; others are lines of text."""


@contextmanager
def _io_errors_as_value_error(source: object) -> Iterator[None]:
    """What goes wrong while rows are read (not while they are used), told in one sentence."""
    try:
        yield
    except Exception as error:  # libraries raise what they like
        raise ValueError(f"{source} cannot be read: {formats.short_error(error)}") from None
