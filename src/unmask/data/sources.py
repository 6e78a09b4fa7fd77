"""Where text comes from: a source is a name, and its documents are streamed.

    stdlib                       the running Python's standard library, one document a file
    PATH                         a file, or all files of a folder: text, or by suffix
                                 .json (a list, or lines) .jsonl .ndjson .csv .tsv .parquet .arrow, FASTA (.fa
                                 .fas .fasta .fna .ffn .frn .faa), FASTQ (.fq .fastq), each also with .gz; or
                                 a folder of `save_to_disk` (its split `train`; PATH/SPLIT for others)
    hub:NAME[:CONFIG[:SPLIT]]    a data set of the hub, or a local data set folder

Memory does not grow with the corpus. The same names over the same files give the same pieces everywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias, cast

from unmask.data.readers import text as formats
from unmask.data.readers.fasta import FASTA_SUFFIXES, FASTQ_SUFFIXES, read_fasta, read_fastq
from unmask.data.readers.records import AnyPairFormat, RecordFormat, TextRecord, read_records
from unmask.data.readers.save_to_disk import DATASET_DICT_FILE, saved_dataset_files
from unmask.data.readers.tables import JSON_READERS, SEEKABLE_SUFFIXES, table_readers
from unmask.data.readers.text import TextChunk
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session

__all__ = ["SourceConfig", "TextChunk", "file_stats", "fingerprints", "read_documents", "text_bytes"]

STDLIB_SOURCE, HUB_PREFIX = "stdlib", "hub:"

_DocumentReader: TypeAlias = Callable[[BinaryIO, str], Iterator[TextChunk]]


@dataclass(frozen=True)
class SourceConfig:
    """How documents are found in files."""

    lines: bool = False
    """In text files, every line is a document."""
    field: str = "text"
    """The field of JSON objects that holds the text."""
    column: str = "text"
    """The column of csv, tsv, parquet, Arrow and hub tables: its name; in csv and tsv without header, its
    number."""
    pair_format: AnyPairFormat | None = None
    """A row is a prompt and a completion, found in these columns in place of `field` or `column`."""
    encoding: str = formats.DEFAULT_ENCODING
    """What the bytes of text, JSON, csv, tsv and sequence files stand for."""
    delimiter: str | None = None
    """What stands between the columns of csv and tsv; if not named, a comma and a tab."""

    def __post_init__(self) -> None:
        formats.validate_encoding(self.encoding)
        delimiter = self.delimiter
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
            raise ValueError(f"a delimiter is one character, as ; or a tab; got {delimiter!r}")

    def readers_by_suffix(self) -> dict[str, _DocumentReader]:
        """How a file with a suffix is read; other files are text."""
        fields = self.pair_format or TextRecord(self.field)
        rows = {
            suffix: partial(
                read_records,
                table_reader=table,
                record_format=fields if suffix in JSON_READERS else self.record_format,
            )
            for suffix, table in table_readers(self.encoding, self.delimiter).items()
        }
        return {
            **rows,
            **dict.fromkeys(FASTA_SUFFIXES, self._plain_reader(read_fasta)),
            **dict.fromkeys(FASTQ_SUFFIXES, self._plain_reader(read_fastq)),
        }

    def reader_for(self, suffix: str) -> _DocumentReader:
        """How a file with this suffix is read."""
        return self.readers_by_suffix().get(
            suffix, self._plain_reader(formats.read_lines if self.lines else formats.read_text)
        )

    def _plain_reader(self, reader: Callable[..., Iterator[TextChunk]]) -> _DocumentReader:
        """How a file without columns is read."""
        return _reject_pairs if self.pair_format else partial(reader, encoding=self.encoding)

    @property
    def record_format(self) -> RecordFormat:
        """What a row of a table is."""
        return self.pair_format or TextRecord(self.column)


def read_documents(names: Sequence[str], config: SourceConfig) -> Iterator[TextChunk]:
    """All documents of all sources in order, each in one or more pieces, the last of which `ends`."""
    for name in names:
        empty = True
        for piece in _parse_source(name).read_documents(config):
            empty = False
            yield piece
        if empty:
            raise ValueError(f"{name} holds no text")


def fingerprints(names: Sequence[str]) -> dict[str, str]:
    """What each source is: with equal identities and equal options, its text is equal.

    Files are read once, for their SHA-256. A hub data set is taken at its word: its fingerprint names the
    revision and the files.
    """
    return {name: _parse_source(name).fingerprint() for name in names}


def file_stats(names: Sequence[str]) -> tuple[str, ...]:
    """What the file system says of the files, at no cost: if it changes, `identity` may have changed."""
    return tuple(line for name in names for line in _parse_source(name).file_stats())


def text_bytes(names: Sequence[str]) -> int | None:
    """Bytes of text, where the sizes of files tell: None if any is zipped, a table or from the hub."""
    sizes = [_parse_source(name).text_bytes() for name in names]
    return sum(size for size in sizes if size is not None) if None not in sizes else None


@dataclass(frozen=True)
class _FileSource:
    """A file, or all files of a folder that are not hidden."""

    path: Path

    def read_documents(self, config: SourceConfig) -> Iterator[TextChunk]:
        for file in self.files():
            suffix, zipped = _format_suffix(file)
            with _open_file(file, zipped, seekable=suffix in SEEKABLE_SUFFIXES) as handle:
                yield from config.reader_for(suffix)(handle, str(file))

    def fingerprint(self) -> str:
        suffix, zipped = _format_suffix(self.path)
        kind = "folder" if self.path.is_dir() else (suffix or "text") + (".gz" if zipped else "")
        return f"{kind} sha256:{_sha256_of_files(self.path, self.files())}"

    def file_stats(self) -> list[str]:
        with _io_errors_as_value_error(self.path):
            stats = [(file, file.stat()) for file in self.files()]
        return [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]

    def text_bytes(self) -> int | None:
        files = self.files()
        with _io_errors_as_value_error(self.path):
            return None if any(any(_format_suffix(file)) for file in files) else _total_size(files)

    def files(self) -> list[Path]:
        with _io_errors_as_value_error(self.path):
            if self.path.is_dir():
                saved = saved_dataset_files(self.path)
                if saved is not None:
                    return saved
                found = _list_files(self.path, lambda name: not name.startswith("."))
                if not found:
                    raise ValueError(f"the folder {self.path} holds no files")
                return found
            if not self.path.exists():
                raise ValueError(
                    f"there is no file or folder {self.path} (other sources are {STDLIB_SOURCE} and {HUB_PREFIX}NAME)"
                )
            if not self.path.is_file():
                raise ValueError(f"{self.path} is neither a file nor a folder")
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is empty")
            return [self.path]


@dataclass(frozen=True)
class _StdlibSource:
    """The standard library's .py files, without what is installed, tests it, or was written by its build."""

    excluded_names = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    generated_prefixes = ("config-", "_sysconfigdata")  # other on every machine

    def read_documents(self, config: SourceConfig) -> Iterator[TextChunk]:
        if config.pair_format is not None:
            _raise_no_columns(STDLIB_SOURCE)
        root = self.root()
        for file in self.files():
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError:
                continue  # a few files are written in other encodings on purpose
            yield from formats.chunk_document(text, f"{STDLIB_SOURCE}/{file.relative_to(root).as_posix()}")

    def fingerprint(self) -> str:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"Python {version} sha256:{_sha256_of_files(self.root(), self.files())}"

    def file_stats(self) -> list[str]:
        return []

    def text_bytes(self) -> int:
        return _total_size(self.files())

    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        found = _list_files(
            self.root(),
            lambda name: name not in self.excluded_names and not name.startswith(self.generated_prefixes),
        )
        sources = [file for file in found if file.suffix == ".py"]
        if not sources:
            raise ValueError(f"this Python has no standard library sources in {self.root()}")
        return sources


@dataclass(frozen=True)
class _HubSource:
    """A data set that the package `datasets` loads, streamed."""

    name: str
    config: str | None
    split: str

    def read_documents(self, config: SourceConfig) -> Iterator[TextChunk]:
        for number, row in enumerate(self._rows(), start=1):
            where = f"{self.name} {self.split} row {number}"
            for column in config.record_format.columns:
                if column not in row:
                    raise ValueError(f"{where} has no column {column!r}; it has {formats.format_names(row)}")
            yield from config.record_format.to_chunks([row[column] for column in config.record_format.columns], where)

    def fingerprint(self) -> str:
        return f"hub {self.name} config:{self.config} split:{self.split} fingerprint:{self._dataset_hash()}"

    def file_stats(self) -> list[str]:
        return []

    def text_bytes(self) -> None:
        return None

    def _dataset_hash(self) -> str:
        folder = _FileSource(Path(self.name))
        if folder.path.is_dir():  # whose fingerprint would know times and not contents
            return folder.fingerprint()
        datasets: Any = formats.import_optional("datasets", "hub")
        with self._load_errors_as_value_error(), hub_session(self.name) as online:
            self._require_online(online)
            return str(datasets.load_dataset_builder(self.name, self.config).hash)

    def _rows(self) -> Iterator[dict[str, Any]]:
        datasets: Any = formats.import_optional("datasets", "hub")
        with self._load_errors_as_value_error(), hub_session(self.name) as online:
            self._require_online(online)
            # Errors of whoever uses a row are not raised in here: only loading is explained.
            yield from datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)

    def _require_online(self, online: bool) -> None:
        """Rows are streamed, so there must be somebody to stream them from; a folder is here."""
        if not online:
            raise ValueError(UNREACHABLE_MESSAGE)

    @contextmanager
    def _load_errors_as_value_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(f"the data set {self.name} cannot be loaded: {formats.short_error(error)}") from None


def _reject_pairs(_handle: BinaryIO, source: str) -> Iterator[TextChunk]:
    _raise_no_columns(source)


def _raise_no_columns(source: str) -> NoReturn:
    raise ValueError(
        f"{source} has no columns to take pairs from; pairs come from {', '.join(table_readers())} and {HUB_PREFIX}NAME"
    )


def _parse_source(name: str) -> _FileSource | _StdlibSource | _HubSource:
    if name == STDLIB_SOURCE:
        return _StdlibSource()
    if not name.startswith(HUB_PREFIX):
        return _FileSource(Path(name))
    dataset, config, split, *rest = [*name.removeprefix(HUB_PREFIX).split(":"), "", ""]
    if not dataset or any(rest):
        raise ValueError(
            f"a hub data set is named {HUB_PREFIX}NAME, {HUB_PREFIX}NAME:CONFIG or {HUB_PREFIX}NAME:CONFIG:SPLIT;"
            f" got {name}"
        )
    split = split or "train"
    if saved_dataset_files(Path(dataset), split) is not None:
        path = Path(dataset)
        return _FileSource(path / split if (path / DATASET_DICT_FILE).exists() else path)
    return _HubSource(dataset, config or None, split)


def _list_files(root: Path, keep: Callable[[str], bool]) -> list[Path]:
    """The wanted files under wanted folders, sorted by their path from the root."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root, onerror=_raise):
        inner[:] = filter(keep, inner)
        found.extend(Path(folder, name) for name in filter(keep, names))
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _total_size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _format_suffix(file: Path) -> tuple[str, bool]:
    """The suffix that says how to read a file, and whether it is in gzip; empty if it is text."""
    zipped = file.suffix.lower() == ".gz"
    suffix = (file.with_suffix("") if zipped else file).suffix.lower()
    return suffix if suffix in SourceConfig().readers_by_suffix() else "", zipped


@contextmanager
def _open_file(file: Path, gzipped: bool, seekable: bool) -> Iterator[BinaryIO]:
    """The contents of a file; what goes wrong while they are read is told in one sentence."""
    with _io_errors_as_value_error(file), gzip.open(file) if gzipped else file.open("rb") as plain:
        if not (gzipped and seekable):
            yield cast(BinaryIO, plain)
            return
        with tempfile.TemporaryFile() as unzipped:
            shutil.copyfileobj(plain, unzipped)
            unzipped.seek(0)
            yield cast(BinaryIO, unzipped)


@contextmanager
def _io_errors_as_value_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is not a gzip file that can be read: {error}") from None
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _raise(error: OSError) -> None:
    raise error


def _sha256_of_files(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 of a file, or of the paths and contents of a folder's files."""
    total = hashlib.sha256()
    for file in files:
        with _open_file(file, gzipped=False, seekable=False) as handle:
            each = hashlib.file_digest(handle, "sha256").hexdigest()  # type: ignore[arg-type]
        if file == root:
            return each
        total.update(f"{file.relative_to(root).as_posix()}\0{each}\n".encode())
    return total.hexdigest()
