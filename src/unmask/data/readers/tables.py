"""Rows of tables from an open file: JSON, csv, tsv, parquet, Arrow.

Rows are streamed; each row is read whole. A malformed row raises one sentence that names the file and the
line.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from unmask.data.readers._json_records import JSON_READERS
from unmask.data.readers._text import DEFAULT_ENCODING, decode_stream, format_names, numbered_lines
from unmask.io.errors import first_line, import_optional

ColumnOptions: TypeAlias = Sequence[tuple[str, ...]]
"""Alternatives, the preferred one first: the columns that are read from every row."""

SEEKABLE_SUFFIXES = (".parquet", ".arrow")
"""Formats that are not read from beginning to end."""

_ROWS_PER_BATCH = 256


class _TableRow(NamedTuple):
    """A row: its location (for error messages), the selected columns and their values."""

    location: str
    columns: tuple[str, ...]
    values: Sequence[Any]


TableReader: TypeAlias = Callable[[BinaryIO, str, ColumnOptions], Iterator[_TableRow]]
"""Reads the rows of an open file, given its name and the wanted columns."""


def table_readers(encoding: str = DEFAULT_ENCODING, delimiter: str | None = None) -> dict[str, TableReader]:
    """The reader of each table format, by suffix.

    A csv file has commas and quoted cells; a tsv file has tabs, and quotes are ordinary characters.
    `delimiter` replaces the comma and the tab.
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


def first_available_columns(
    options: ColumnOptions, available: Collection[str], location: str, noun: str = "column"
) -> tuple[str, ...]:
    """The first alternative whose columns are all available."""
    for columns in options:
        if all(column in available for column in columns):
            return columns
    raise ValueError(
        f"{location} has no {noun} {_format_missing(options, available)}; it has {format_names(available)}"
    )


def _format_missing(options: ColumnOptions, available: Collection[str]) -> str:
    if len(options) == 1:
        return repr(next(column for column in options[0] if column not in available))
    return " or ".join(" and ".join(map(repr, columns)) for columns in options)


def _read_json_rows(
    handle: BinaryIO, source: str, options: ColumnOptions, suffix: str, encoding: str
) -> Iterator[_TableRow]:
    """One row per object. A string in a list is the value of the wanted field, if only one is wanted."""
    single = next((columns for columns in options if len(columns) == 1), None)
    for location, record in JSON_READERS[suffix](decode_stream(handle, source, encoding), source):
        if not isinstance(record, str):
            columns = first_available_columns(options, record, location, "field")
            yield _TableRow(location, columns, [record[column] for column in columns])
        elif single is not None:
            yield _TableRow(location, single, [record])
        else:
            raise ValueError(f"{location} is a text where an object with {format_names(options[0])} is expected")


def _read_delimited(
    handle: BinaryIO, source: str, options: ColumnOptions, dialect: dict[str, Any], encoding: str
) -> Iterator[_TableRow]:
    """Columns are named by the header; columns that are numbers count from 1 in a file without a header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses cells of more than 128 kB
    lines = numbered_lines(decode_stream(handle, source, encoding), source)
    columns: tuple[str, ...] = ()
    indices: list[int] = []
    for location, row in _csv_rows((f"{line}\n" for _, line in lines), source, dialect):
        if not columns:
            columns, indices, is_header = _find_columns(row, options, source)
            if is_header:
                continue
        if not row:
            continue
        if max(indices) >= len(row):
            raise ValueError(f"{location} has {len(row)} columns and so no column {max(indices) + 1}")
        yield _TableRow(location, columns, [row[index] for index in indices])


def _csv_rows(lines: Iterable[str], source: str, dialect: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    rows = csv.reader(lines, **dialect)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{source} line {rows.line_num} is not a row of a table: {error}") from None
        if row is None:
            return
        yield f"{source} line {rows.line_num}", row


def _find_columns(row: list[str], options: ColumnOptions, source: str) -> tuple[tuple[str, ...], list[int], bool]:
    """The selected columns, their indices in a row, and whether the first row is a header."""
    for columns in options:
        if all(column.isdecimal() for column in columns):
            if len(options) == 1 or (row and row[0].isdecimal()):
                return columns, [_column_index(column, source) for column in columns], False
        elif all(column in row for column in columns):
            return columns, [row.index(column) for column in columns], True
    missing = [column for column in options[0] if column not in row]
    others = [sign for sign in ";\t,|" if len(row) == 1 and missing and missing[0] in row[0].split(sign)]
    if others:
        name = "tab" if others[0] == "\t" else others[0]
        raise ValueError(f"{source} seems to be separated by {name!r}: use --delimiter {name!r}")
    raise ValueError(
        f"{source} has no column {_format_missing(options, row)}; its first line has {format_names(row)}"
        " (for a file without a header, give the column's number)"
    )


def _column_index(column: str, source: str) -> int:
    if int(column) < 1:
        raise ValueError(f"columns are counted from 1; got {column} for {source}")
    return int(column) - 1


def _read_parquet(handle: BinaryIO, source: str, options: ColumnOptions) -> Iterator[_TableRow]:
    arrow: Any = import_optional("pyarrow", "parquet")
    parquet: Any = import_optional("pyarrow.parquet", "parquet")
    try:
        file = parquet.ParquetFile(handle, pre_buffer=False)  # a buffer would hold a whole row group in memory
        columns = first_available_columns(options, file.schema_arrow.names, source)
        batches = file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=list(columns))
        yield from _arrow_rows(batches, source, [columns])
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{source} is not a parquet file that can be read: {first_line(error)}") from None


def _read_arrow(handle: BinaryIO, source: str, options: ColumnOptions) -> Iterator[_TableRow]:
    """Rows of Arrow's stream or file format; nothing in the file is executed."""
    arrow: Any = import_optional("pyarrow", "parquet")
    try:
        start = handle.read(6)
        handle.seek(0)
        if start == b"ARROW1":
            file = arrow.ipc.open_file(handle)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            batches = arrow.ipc.open_stream(handle)
        yield from _arrow_rows(batches, source, options)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{source} is not an Arrow file that can be read: {first_line(error)}") from None


def _arrow_rows(batches: Iterable[Any], source: str, options: ColumnOptions) -> Iterator[_TableRow]:
    number = 0
    for batch in batches:
        columns = first_available_columns(options, batch.schema.names, source)
        for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
            number += 1
            yield _TableRow(f"{source} row {number}", columns, values)
