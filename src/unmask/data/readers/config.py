"""How documents are found in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeAlias

from unmask.data.readers._fasta import SEQUENCE_READERS
from unmask.data.readers._json_records import JSON_READERS
from unmask.data.readers._records import AnyPairFormat, RecordFormat, TextRecord, read_records
from unmask.data.readers._text import DEFAULT_ENCODING, TextChunk, read_lines, read_text, validate_encoding
from unmask.data.readers.tables import table_readers
from unmask.io.hub import HUB_PREFIX

_DocumentReader: TypeAlias = Callable[[BinaryIO, str], Iterator[TextChunk]]


@dataclass(frozen=True)
class SourceConfig:
    """How documents are found in files."""

    lines: bool = False
    """In text files, every line is a document."""
    field: str = "text"
    """The field of JSON objects that holds the text."""
    column: str = "text"
    """The column of csv, tsv, parquet, Arrow and hub tables that holds the text: its name, or its number in csv
    and tsv files without a header."""
    pair_format: AnyPairFormat | None = None
    """Rows are prompt-completion pairs in these columns, instead of texts in `field` or `column`."""
    encoding: str = DEFAULT_ENCODING
    """The character encoding of text, JSON, csv, tsv and sequence files."""
    delimiter: str | None = None
    """The column separator of csv and tsv files; None: a comma and a tab."""
    interval_bases: int | None = None
    """Extend each interval of a BED file from its start to so many bases, moved back inside its contig; None: as it
    is."""

    def __post_init__(self) -> None:
        validate_encoding(self.encoding)
        delimiter = self.delimiter
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
            raise ValueError(f"a delimiter must be one character, such as ; or a tab; got {delimiter!r}")
        if self.interval_bases is not None and self.interval_bases < 1:
            raise ValueError(f"interval_bases must be at least 1; got {self.interval_bases}")

    @property
    def record_format(self) -> RecordFormat:
        """The format of a table's row."""
        return self.pair_format or TextRecord(self.column)

    def readers_by_suffix(self) -> dict[str, _DocumentReader]:
        """The reader of each known suffix; files of other suffixes are text."""
        json_format = self.pair_format or TextRecord(self.field)
        tables = {
            suffix: partial(
                read_records,
                table_reader=table_reader,
                record_format=json_format if suffix in JSON_READERS else self.record_format,
            )
            for suffix, table_reader in table_readers(self.encoding, self.delimiter).items()
        }
        return {**tables, **{suffix: self._text_reader(reader) for suffix, reader in SEQUENCE_READERS.items()}}

    def reader_for(self, suffix: str) -> _DocumentReader:
        """The reader of files with this suffix."""
        return self.readers_by_suffix().get(suffix, self._text_reader(read_lines if self.lines else read_text))

    def require_text(self, source: str) -> None:
        """Raise if pairs are wanted from a source without columns."""
        if self.pair_format is not None:
            raise ValueError(
                f"{source} has no columns to take pairs from;"
                f" pairs come from {', '.join(table_readers())} and {HUB_PREFIX}NAME"
            )

    def _text_reader(self, reader: Callable[..., Iterator[TextChunk]]) -> _DocumentReader:
        """A reader of files without columns."""

        def read(handle: BinaryIO, source: str) -> Iterator[TextChunk]:
            self.require_text(source)
            return reader(handle, source, encoding=self.encoding)

        return read
