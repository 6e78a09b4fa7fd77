"""One open file to the rows of a table: JSON, csv, tsv, parquet, Arrow.

Rows are streamed; each must be read whole. What is no row is refused in one sentence that names the file and
the place in it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from unmask.data.readers.json_records import read_json, read_json_lines
from unmask.data.readers.text import (
    DEFAULT_ENCODING,
    decode_stream,
    format_names,
    import_optional,
    numbered_lines,
    short_error,
)


class _TableRow(NamedTuple):
    """A row of a table: where it stands, for people, and its values in the wanted columns."""

    where: str
    values: Sequence[Any]


TableReader: TypeAlias = Callable[[BinaryIO, str, Sequence[str]], Iterator[_TableRow]]
"""An open file, its name and the wanted columns to rows."""

JSON_READERS = {".json": read_json, ".jsonl": read_json_lines, ".ndjson": read_json_lines}
"""How files of JSON objects are read, by suffix."""

SEEKABLE_SUFFIXES = (".parquet", ".arrow")
"""Files that are not read from their beginning to their end."""


def _read_json_rows(
    handle: BinaryIO, source: str, fields: Sequence[str], suffix: str, encoding: str
) -> Iterator[_TableRow]:
    """A row an object: these fields of it; a bare text in a list is the one field that is wanted."""
    for where, record in JSON_READERS[suffix](decode_stream(handle, source, encoding), source):
        if isinstance(record, str):
            if len(fields) > 1:
                raise ValueError(f"{where} is a text where an object with {format_names(fields)} is expected")
            yield _TableRow(where, [record])
            continue
        for field in fields:
            if field not in record:
                raise ValueError(f"{where} has no field {field!r}; it has {format_names(record)}")
        yield _TableRow(where, [record[field] for field in fields])


def _read_delimited(
    handle: BinaryIO,
    source: str,
    columns: Sequence[str],
    dialect: dict[str, Any],
    encoding: str = DEFAULT_ENCODING,
) -> Iterator[_TableRow]:
    """The columns that the header names so; if all are numbers, they count from 1, without a header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the library refuses texts of more than 128 kB
    lines = numbered_lines(decode_stream(handle, source, encoding), source)
    rows = csv.reader((f"{line}\n" for _, line in lines), **dialect)
    numbered = all(column.isdecimal() for column in columns)
    places = [_column_index(column, source) for column in columns] if numbered else None
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{source} line {rows.line_num} is not a row of a table: {error}") from None
        if row is None:
            return
        where = f"{source} line {rows.line_num}"
        if places is None:
            places = [_find_column(row, column, source) for column in columns]
        elif row:
            if max(places) >= len(row):
                raise ValueError(f"{where} has {len(row)} columns and so no column {max(places) + 1}")
            yield _TableRow(where, [row[place] for place in places])


def _read_parquet(handle: BinaryIO, source: str, columns: Sequence[str]) -> Iterator[_TableRow]:
    """The columns with these names."""
    arrow: Any = import_optional("pyarrow", "parquet")
    file: Any = import_optional("pyarrow.parquet", "parquet")
    try:
        opened = file.ParquetFile(handle, pre_buffer=False)  # which would hold a whole row group in memory
        known = opened.schema_arrow.names
        for column in columns:
            if column not in known:
                raise ValueError(f"{source} has no column {column!r}; it has {format_names(known)}")
        number = 0
        for batch in opened.iter_batches(batch_size=256, columns=list(columns)):
            for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                number += 1
                yield _TableRow(f"{source} row {number}", values)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{source} is not a parquet file that can be read: {short_error(error)}") from None


def _read_arrow(handle: BinaryIO, source: str, columns: Sequence[str]) -> Iterator[_TableRow]:
    """The columns with these names, of Arrow's stream or file format; nothing in it is executed."""
    library: Any = import_optional("pyarrow", "parquet")
    try:
        start = handle.read(6)
        handle.seek(0)
        batches = _arrow_file_batches(handle) if start == b"ARROW1" else library.ipc.open_stream(handle)
        number = 0
        for batch in batches:
            known = batch.schema.names
            for column in columns:
                if column not in known:
                    raise ValueError(f"{source} has no column {column!r}; it has {format_names(known)}")
            for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                number += 1
                yield _TableRow(f"{source} row {number}", values)
    except (library.ArrowException, OSError) as error:
        raise ValueError(f"{source} is not an Arrow file that can be read: {short_error(error)}") from None


def _arrow_file_batches(handle: BinaryIO) -> Iterator[Any]:
    reader = import_optional("pyarrow", "parquet").ipc.open_file(handle)
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def table_readers(encoding: str = DEFAULT_ENCODING, delimiter: str | None = None) -> dict[str, TableReader]:
    """How files with rows and columns are read, by suffix.

    A csv has commas and quotes. A tsv has tabs, and a quote in it is only a quote, as data sets have it. If a
    `delimiter` is named, both have that.
    """
    csv_dialect = {"strict": True, "delimiter": delimiter or ","}
    tsv_dialect = {"quoting": csv.QUOTE_NONE, "delimiter": delimiter or "\t"}
    return {
        **{suffix: partial(_read_json_rows, suffix=suffix, encoding=encoding) for suffix in JSON_READERS},
        ".csv": partial(_read_delimited, dialect=csv_dialect, encoding=encoding),
        ".tsv": partial(_read_delimited, dialect=tsv_dialect, encoding=encoding),
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
    }


def _column_index(column: str, source: str) -> int:
    """Where in a row the column with this number stands."""
    if int(column) < 1:
        raise ValueError(f"columns are counted from 1; got {column} for {source}")
    return int(column) - 1


def _find_column(row: list[str], column: str, source: str) -> int:
    if column in row:
        return row.index(column)
    others = [sign for sign in ";\t,|" if len(row) == 1 and column in row[0].split(sign)]
    if others:
        name = "tab" if others[0] == "\t" else others[0]
        raise ValueError(f"{source} is separated by {name!r}: say so with --delimiter {name!r}")
    raise ValueError(
        f"{source} has no column {column!r}; its first line has {format_names(row)}"
        " (for a file without a header, give the column's number)"
    )
