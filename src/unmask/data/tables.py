"""One open file to the rows of a table: JSON lines, csv, tsv, parquet.

Rows are streamed; each must be read whole. What is no row is refused in one sentence that names the file and
the place in it.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from unmask.data.formats import extra, first_line, listed, numbered_lines


class Row(NamedTuple):
    """A row of a table: where it stands, for people, and its values in the wanted columns."""

    where: str
    values: Sequence[Any]


Table: TypeAlias = Callable[[BinaryIO, str, Sequence[str]], Iterator[Row]]
"""An open file, its name and the wanted columns to rows."""


def json_lines(handle: BinaryIO, origin: str, fields: Sequence[str]) -> Iterator[Row]:
    """A row a line: these fields of a JSON object."""
    for number, line in numbered_lines(handle, origin):
        if line.strip():
            where = f"{origin} line {number}"
            record = _json_object(line, where)
            for field in fields:
                if field not in record:
                    raise ValueError(f"{where} has no field {field!r}; it has {listed(record)}")
            yield Row(where, [record[field] for field in fields])


def table(handle: BinaryIO, origin: str, columns: Sequence[str], dialect: dict[str, Any]) -> Iterator[Row]:
    """The columns that the header names so; if all are numbers, they count from 1, without a header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the library refuses texts of more than 128 kB
    rows = csv.reader((f"{line}\n" for _, line in numbered_lines(handle, origin)), **dialect)
    numbered = all(column.isdecimal() for column in columns)
    places = [_place(column, origin) for column in columns] if numbered else None
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{origin} line {rows.line_num} is not a row of a table: {error}") from None
        if row is None:
            return
        where = f"{origin} line {rows.line_num}"
        if places is None:
            places = [_header(row, column, origin) for column in columns]
        elif row:
            if max(places) >= len(row):
                raise ValueError(f"{where} has {len(row)} columns and so no column {max(places) + 1}")
            yield Row(where, [row[place] for place in places])


def comma_separated(handle: BinaryIO, origin: str, columns: Sequence[str]) -> Iterator[Row]:
    """A table with commas and quotes."""
    return table(handle, origin, columns, {"strict": True})


def tab_separated(handle: BinaryIO, origin: str, columns: Sequence[str]) -> Iterator[Row]:
    """A table with tabs, where a quote is only a quote, as data sets have it."""
    return table(handle, origin, columns, {"delimiter": "\t", "quoting": csv.QUOTE_NONE})


def parquet(handle: BinaryIO, origin: str, columns: Sequence[str]) -> Iterator[Row]:
    """The columns with these names."""
    arrow: Any = extra("pyarrow", "parquet")
    file: Any = extra("pyarrow.parquet", "parquet")
    try:
        opened = file.ParquetFile(handle, pre_buffer=False)  # which would hold a whole row group in memory
        known = opened.schema_arrow.names
        for column in columns:
            if column not in known:
                raise ValueError(f"{origin} has no column {column!r}; it has {listed(known)}")
        number = 0
        for batch in opened.iter_batches(batch_size=256, columns=list(columns)):
            for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                number += 1
                yield Row(f"{origin} row {number}", values)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{origin} is not a parquet file that can be read: {first_line(error)}") from None


TABLES: dict[str, Table] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".parquet": parquet,
}
"""How files with rows and columns are read, by suffix."""


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must hold a JSON object; got {type(record).__name__}")
    return record


def _place(column: str, origin: str) -> int:
    """Where in a row the column with this number stands."""
    if int(column) < 1:
        raise ValueError(f"columns are counted from 1; got {column} for {origin}")
    return int(column) - 1


def _header(row: list[str], column: str, origin: str) -> int:
    if column not in row:
        raise ValueError(
            f"{origin} has no column {column!r}; its first line has {listed(row)}"
            " (for a file without a header, give the column's number)"
        )
    return row.index(column)
