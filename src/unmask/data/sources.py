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

from unmask.data import formats
from unmask.data.columns import AnyPairs, OneText, RowReading, documents_of
from unmask.data.formats import Piece
from unmask.data.hub import UNREACHABLE, lookup
from unmask.data.saved import SPLITS, saved_files
from unmask.data.sequences import FASTA, FASTQ, fasta, fastq
from unmask.data.tables import JSON, SEEKING, tables

__all__ = ["Piece", "SourceOptions", "documents", "identity", "plain_size", "stamp"]

STDLIB, HUB = "stdlib", "hub:"

Reader: TypeAlias = Callable[[BinaryIO, str], Iterator[Piece]]


@dataclass(frozen=True)
class SourceOptions:
    """How documents are found in files."""

    lines: bool = False
    """In text files, every line is a document."""
    field: str = "text"
    """The field of JSON objects that holds the text."""
    column: str = "text"
    """The column of csv, tsv, parquet, Arrow and hub tables: its name; in csv and tsv without header, its
    number."""
    pairs: AnyPairs | None = None
    """A row is a prompt and an answer, found in these columns in place of `field` or `column`."""
    encoding: str = formats.UTF8
    """What the bytes of text, JSON, csv, tsv and sequence files stand for."""
    delimiter: str | None = None
    """What stands between the columns of csv and tsv; if not named, a comma and a tab."""

    def __post_init__(self) -> None:
        formats.check_encoding(self.encoding)
        delimiter = self.delimiter
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
            raise ValueError(f"a delimiter is one character, as ; or a tab; got {delimiter!r}")

    def readers(self) -> dict[str, Reader]:
        """How a file with a suffix is read; other files are text."""
        fields = self.pairs or OneText(self.field)
        rows = {
            suffix: partial(documents_of, table=table, reading=fields if suffix in JSON else self.row)
            for suffix, table in tables(self.encoding, self.delimiter).items()
        }
        return {
            **rows,
            **dict.fromkeys(FASTA, self._unpaired(fasta)),
            **dict.fromkeys(FASTQ, self._unpaired(fastq)),
        }

    def reader(self, suffix: str) -> Reader:
        """How a file with this suffix is read."""
        return self.readers().get(suffix, self._unpaired(formats.lines if self.lines else formats.whole))

    def _unpaired(self, reader: Callable[..., Iterator[Piece]]) -> Reader:
        """How a file without columns is read."""
        return _no_pairs if self.pairs else partial(reader, encoding=self.encoding)

    @property
    def row(self) -> RowReading:
        """What a row of a table is."""
        return self.pairs or OneText(self.column)


def documents(names: Sequence[str], options: SourceOptions) -> Iterator[Piece]:
    """All documents of all sources in order, each in one or more pieces, the last of which `ends`."""
    for name in names:
        empty = True
        for piece in _source(name).documents(options):
            empty = False
            yield piece
        if empty:
            raise ValueError(f"{name} holds no text")


def identity(names: Sequence[str]) -> dict[str, str]:
    """What each source is: with equal identities and equal options, its text is equal.

    Files are read once, for their SHA-256. A hub data set is taken at its word: its fingerprint names the
    revision and the files.
    """
    return {name: _source(name).identity() for name in names}


def stamp(names: Sequence[str]) -> tuple[str, ...]:
    """What the file system says of the files, at no cost: if it changes, `identity` may have changed."""
    return tuple(line for name in names for line in _source(name).stamp())


def plain_size(names: Sequence[str]) -> int | None:
    """Bytes of text, where the sizes of files tell: None if any is zipped, a table or from the hub."""
    sizes = [_source(name).plain_size() for name in names]
    return sum(size for size in sizes if size is not None) if None not in sizes else None


@dataclass(frozen=True)
class _Files:
    """A file, or all files of a folder that are not hidden."""

    path: Path

    def documents(self, options: SourceOptions) -> Iterator[Piece]:
        for file in self.files():
            suffix, zipped = _suffix(file)
            with _opened(file, zipped, seekable=suffix in SEEKING) as handle:
                yield from options.reader(suffix)(handle, str(file))

    def identity(self) -> str:
        suffix, zipped = _suffix(self.path)
        kind = "folder" if self.path.is_dir() else (suffix or "text") + (".gz" if zipped else "")
        return f"{kind} sha256:{_hash(self.path, self.files())}"

    def stamp(self) -> list[str]:
        with _explained(self.path):
            stats = [(file, file.stat()) for file in self.files()]
        return [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]

    def plain_size(self) -> int | None:
        files = self.files()
        with _explained(self.path):
            return None if any(any(_suffix(file)) for file in files) else _total_size(files)

    def files(self) -> list[Path]:
        with _explained(self.path):
            if self.path.is_dir():
                saved = saved_files(self.path)
                if saved is not None:
                    return saved
                found = _walk(self.path, lambda name: not name.startswith("."))
                if not found:
                    raise ValueError(f"the folder {self.path} holds no files")
                return found
            if not self.path.exists():
                raise ValueError(
                    f"there is no file or folder {self.path} (other sources are {STDLIB} and {HUB}NAME)"
                )
            if not self.path.is_file():
                raise ValueError(f"{self.path} is neither a file nor a folder")
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is empty")
            return [self.path]


@dataclass(frozen=True)
class _Stdlib:
    """The standard library's .py files, without what is installed, tests it, or was written by its build."""

    left_out = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    built = ("config-", "_sysconfigdata")  # other on every machine

    def documents(self, options: SourceOptions) -> Iterator[Piece]:
        if options.pairs is not None:
            _refuse_pairs(STDLIB)
        root = self.root()
        for file in self.files():
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError:
                continue  # a few files are written in other encodings on purpose
            yield from formats.document(text, f"{STDLIB}/{file.relative_to(root).as_posix()}")

    def identity(self) -> str:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"Python {version} sha256:{_hash(self.root(), self.files())}"

    def stamp(self) -> list[str]:
        return []

    def plain_size(self) -> int:
        return _total_size(self.files())

    def root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[Path]:
        found = _walk(self.root(), lambda name: name not in self.left_out and not name.startswith(self.built))
        sources = [file for file in found if file.suffix == ".py"]
        if not sources:
            raise ValueError(f"this Python has no standard library sources in {self.root()}")
        return sources


@dataclass(frozen=True)
class _Hub:
    """A data set that the package `datasets` loads, streamed."""

    name: str
    config: str | None
    split: str

    def documents(self, options: SourceOptions) -> Iterator[Piece]:
        for number, row in enumerate(self._rows(), start=1):
            where = f"{self.name} {self.split} row {number}"
            for column in options.row.columns:
                if column not in row:
                    raise ValueError(f"{where} has no column {column!r}; it has {formats.listed(row)}")
            yield from options.row.pieces([row[column] for column in options.row.columns], where)

    def identity(self) -> str:
        return f"hub {self.name} config:{self.config} split:{self.split} fingerprint:{self._fingerprint()}"

    def stamp(self) -> list[str]:
        return []

    def plain_size(self) -> None:
        return None

    def _fingerprint(self) -> str:
        folder = _Files(Path(self.name))
        if folder.path.is_dir():  # whose fingerprint would know times and not contents
            return folder.identity()
        datasets: Any = formats.extra("datasets", "hub")
        with self._explained(), lookup(self.name) as online:
            self._check(online)
            return str(datasets.load_dataset_builder(self.name, self.config).hash)

    def _rows(self) -> Iterator[dict[str, Any]]:
        datasets: Any = formats.extra("datasets", "hub")
        with self._explained(), lookup(self.name) as online:
            self._check(online)
            # Errors of whoever uses a row are not raised in here: only loading is explained.
            yield from datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)

    def _check(self, online: bool) -> None:
        """Rows are streamed, so there must be somebody to stream them from; a folder is here."""
        if not online:
            raise ValueError(UNREACHABLE)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"the data set {self.name} cannot be loaded: {formats.first_line(error)}"
            ) from None


def _no_pairs(_handle: BinaryIO, origin: str) -> Iterator[Piece]:
    _refuse_pairs(origin)


def _refuse_pairs(origin: str) -> NoReturn:
    raise ValueError(
        f"{origin} has no columns to take pairs from; pairs come from {', '.join(tables())} and {HUB}NAME"
    )


def _source(name: str) -> _Files | _Stdlib | _Hub:
    if name == STDLIB:
        return _Stdlib()
    if not name.startswith(HUB):
        return _Files(Path(name))
    dataset, config, split, *rest = [*name.removeprefix(HUB).split(":"), "", ""]
    if not dataset or any(rest):
        raise ValueError(
            f"a hub data set is named {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT; got {name}"
        )
    split = split or "train"
    if saved_files(Path(dataset), split) is not None:
        path = Path(dataset)
        return _Files(path / split if (path / SPLITS).exists() else path)
    return _Hub(dataset, config or None, split)


def _walk(root: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The wanted files under wanted folders, sorted by their path from the root."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root, onerror=_raise):
        inner[:] = filter(wanted, inner)
        found.extend(Path(folder, name) for name in filter(wanted, names))
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _total_size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _suffix(file: Path) -> tuple[str, bool]:
    """The suffix that says how to read a file, and whether it is in gzip; empty if it is text."""
    zipped = file.suffix.lower() == ".gz"
    suffix = (file.with_suffix("") if zipped else file).suffix.lower()
    return suffix if suffix in SourceOptions().readers() else "", zipped


@contextmanager
def _opened(file: Path, zipped: bool, seekable: bool) -> Iterator[BinaryIO]:
    """The contents of a file; what goes wrong while they are read is told in one sentence."""
    with _explained(file), gzip.open(file) if zipped else file.open("rb") as plain:
        if not (zipped and seekable):
            yield cast(BinaryIO, plain)
            return
        with tempfile.TemporaryFile() as unzipped:
            shutil.copyfileobj(plain, unzipped)
            unzipped.seek(0)
            yield cast(BinaryIO, unzipped)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is not a gzip file that can be read: {error}") from None
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _raise(error: OSError) -> None:
    raise error


def _hash(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 of a file, or of the paths and contents of a folder's files."""
    total = hashlib.sha256()
    for file in files:
        with _opened(file, zipped=False, seekable=False) as handle:
            each = hashlib.file_digest(handle, "sha256").hexdigest()  # type: ignore[arg-type]
        if file == root:
            return each
        total.update(f"{file.relative_to(root).as_posix()}\0{each}\n".encode())
    return total.hexdigest()
