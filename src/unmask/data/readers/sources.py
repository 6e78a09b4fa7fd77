"""Text sources: a source is named by a string, and its documents are streamed.

    stdlib                       the running Python's standard library, one document per file
    PATH                         a file, or all files of a folder: text, or by suffix
                                 .json (a list, or lines) .jsonl .ndjson .csv .tsv .parquet .arrow, FASTA (.fa
                                 .fas .fasta .fna .ffn .frn .faa), FASTQ (.fq .fastq), each also with .gz; or
                                 a folder of `save_to_disk` (its split `train`; PATH/SPLIT for others)
    FASTA:CONTIG[:FIRST-LAST]    a region of a FASTA file, counted from 1
    FASTA:BED[:LABEL]            the intervals of a BED file, with this label in the fourth column
    hub:NAME[:CONFIG[:SPLIT]]    a dataset of the hub, or a local dataset folder

Memory use does not grow with the corpus. The same names and files give the same chunks on every machine.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

from unmask.data.readers._class_folders import class_folders, read_class_folders
from unmask.data.readers._fasta import FASTA_SUFFIXES
from unmask.data.readers._regions import Interval, parse_region, read_bed, read_regions
from unmask.data.readers._save_to_disk import DATASET_DICT_FILE, saved_dataset_files
from unmask.data.readers._text import TextChunk, chunk_document, decode_stream, numbered_lines
from unmask.data.readers.config import SourceConfig
from unmask.data.readers.files import format_suffix, list_files, open_file
from unmask.data.readers.hub_dataset import HubDataset, join_columns
from unmask.data.readers.tables import ColumnOptions, table_readers
from unmask.io.checksums import sha256_of_files
from unmask.io.errors import os_errors_as_value_error
from unmask.io.hub import HUB_PREFIX

STDLIB_SOURCE = "stdlib"

_BED_REGION = re.compile(r"(?P<file>.+\.bed(?:\.gz)?)(?::(?P<label>[^:]+))?", re.IGNORECASE)


class Sources:
    """Text sources by name, read in order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @staticmethod
    def exists(name: str) -> bool:
        """Whether a name is that of a file or folder that exists, or of another kind of source."""
        return Path(name).exists() or not isinstance(_parse_source(name), _FileSource)

    def read_documents(self, config: SourceConfig, held_out: Sources | None = None) -> Iterator[TextChunk]:
        """All documents of all sources, each as one or more chunks, the last with `is_last`.

        Regions of FASTA files that are among the sources `held_out` are left out; a file that is among them is
        refused.
        """
        excluded = _Excluded() if held_out is None else held_out._as_excluded(config)
        for name in self.names:
            empty = True
            for chunk in _parse_source(name).read_documents(config, excluded):
                empty = False
                yield chunk
            if empty:
                raise ValueError(f"{name} holds no text{' that is not held out' if excluded.regions else ''}")

    def _as_excluded(self, config: SourceConfig) -> _Excluded:
        sources = [(name, _parse_source(name)) for name in self.names]
        regions: dict[str, list[Interval]] = {}
        files: dict[str, str] = {}
        for name, source in sources:
            if isinstance(source, _RegionSource):
                regions.setdefault(_real(source.path), []).extend(source.intervals(config))
            elif isinstance(source, _FileSource):
                files |= {_real(file): name for file in source.files()}
        return _Excluded(regions, files)

    def read_rows(self, options: ColumnOptions) -> Iterator[tuple[str, tuple[str, ...], Sequence[Any]]]:
        """The rows of tables: the location of each (for error messages), the selected columns and their values.

        `options`: alternative columns, the preferred one first.
        """
        for name in self.names:
            yield from _parse_source(name).read_rows(options)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each source: equal fingerprints and equal configs give equal text.

        Files are read for their SHA-256, once in the life of this object; a hub dataset has a fingerprint of
        its own, of its revision and files.
        """
        self.stats_before  # noqa: B018  # taken before the files are hashed
        return {name: _parse_source(name).fingerprint() for name in self.names}

    @cached_property
    def stats_before(self) -> tuple[str, ...]:
        """`file_stats()` from before the fingerprints were computed."""
        return self.file_stats()

    def file_stats(self) -> tuple[str, ...]:
        """Size and modification time of each file, now: if they change, the fingerprint may have changed."""
        return tuple(line for name in self.names for line in _parse_source(name).file_stats())

    def text_bytes(self) -> int | None:
        """Bytes of text, from file sizes; None if any source is compressed, a table or from the hub."""
        sizes = [_parse_source(name).text_bytes() for name in self.names]
        return sum(size for size in sizes if size is not None) if None not in sizes else None


def read_texts(path: Path, options: ColumnOptions) -> Iterator[str]:
    """The text of each row of a table, or each line of a text file, empty ones included.

    `options`: alternative columns, the preferred one first; several columns are joined by a space. Unlike
    `Sources.read_documents`, empty rows are kept: in a published test set, the end of a blank line counts.
    """
    for file in _FileSource(path).files():
        reader = table_readers().get(format_suffix(file)[0])
        with open_file(file) as handle:
            if reader is None:
                yield from (line for _, line in numbered_lines(decode_stream(handle, str(file))))
            else:
                yield from (join_columns(*row) for row in reader(handle, str(file), options))


@dataclass(frozen=True)
class _Excluded:
    """What is held out for validation, by the file's path: regions of FASTA files, and whole files by their names."""

    regions: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def regions_of(self, file: Path) -> Sequence[Interval]:
        """The regions of a file that are held out; ValueError if all of it is."""
        path = _real(file)
        if path in self.files:
            raise ValueError(f"{file} is among the text to learn and among that to hold out, as {self.files[path]}")
        return self.regions.get(path, ())


@dataclass(frozen=True)
class _RegionSource:
    """A region of a FASTA file, or those that a BED file lists."""

    path: Path
    region: str

    def read_documents(self, config: SourceConfig, excluded: _Excluded) -> Iterator[TextChunk]:
        config.require_text(str(self.path))
        wanted, held_out = self.intervals(config), excluded.regions_of(self.path)
        with open_file(self._file()) as handle:
            yield from read_regions(handle, str(self.path), wanted, held_out, config.encoding)

    def read_rows(self, options: ColumnOptions) -> NoReturn:
        raise ValueError(f"{self.path}:{self.region} is a region of a FASTA file, and no table")

    def intervals(self, config: SourceConfig) -> list[Interval]:
        if self._bed is None:
            return [parse_region(self.region)]
        bed, label = self._bed
        with open_file(_FileSource(bed).files()[0]) as handle:
            return read_bed(handle, str(bed), label, config.interval_bases)

    def fingerprint(self) -> str:
        where = self.region if self._bed is None else f"{_FileSource(self._bed[0]).fingerprint()} {self._bed[1] or ''}"
        return f"{where} of {_FileSource(self._file()).fingerprint()}"

    def file_stats(self) -> list[str]:
        files = [self.path] if self._bed is None else [self.path, self._bed[0]]
        return [line for file in files for line in _FileSource(file).file_stats()]

    def text_bytes(self) -> None:
        return None

    def _file(self) -> Path:
        return _FileSource(self.path).files()[0]

    @property
    def _bed(self) -> tuple[Path, str | None] | None:
        """The BED file and the label, if the region is one."""
        match = _BED_REGION.fullmatch(self.region)
        return None if match is None else (Path(match["file"]), match["label"])


@dataclass(frozen=True)
class _FileSource:
    """A file, or all files of a folder that are not hidden."""

    path: Path

    def read_documents(self, config: SourceConfig, excluded: _Excluded) -> Iterator[TextChunk]:
        for file in self.files():
            held_out = excluded.regions_of(file)
            with open_file(file) as handle:
                if held_out:
                    config.require_text(str(file))
                    yield from read_regions(handle, str(file), None, held_out, config.encoding)
                else:
                    yield from config.reader_for(format_suffix(file)[0])(handle, str(file))

    def read_rows(self, options: ColumnOptions) -> Iterator[tuple[str, tuple[str, ...], Sequence[Any]]]:
        folders = class_folders(self.path)
        if folders is not None:
            yield from read_class_folders(folders, options)
            return
        readers = table_readers()
        for file in self.files():
            suffix, _ = format_suffix(file)
            if suffix not in readers:
                raise ValueError(
                    f"{file} is no table with columns; tables are {', '.join(readers)}, each also with .gz"
                )
            with open_file(file) as handle:
                yield from readers[suffix](handle, str(file), options)

    def fingerprint(self) -> str:
        suffix, gzipped = format_suffix(self.path)
        kind = "folder" if self.path.is_dir() else (suffix or "text") + (".gz" if gzipped else "")
        files = self.files()
        with os_errors_as_value_error(self.path, "read"):
            return f"{kind} sha256:{sha256_of_files(self.path, files)}"

    def file_stats(self) -> list[str]:
        with os_errors_as_value_error(self.path, "read"):
            stats = [(file, file.stat()) for file in self.files()]
        return [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]

    def text_bytes(self) -> int | None:
        files = self.files()
        with os_errors_as_value_error(self.path, "read"):
            return None if any(any(format_suffix(file)) for file in files) else _total_size(files)

    def files(self) -> list[Path]:
        with os_errors_as_value_error(self.path, "read"):
            if self.path.is_dir():
                return self._files_of_folder()
            if not self.path.exists():
                raise ValueError(
                    f"there is no file or folder {self.path} (other sources are {STDLIB_SOURCE} and {HUB_PREFIX}NAME)"
                )
            if not self.path.is_file():
                raise ValueError(f"{self.path} is neither a file nor a folder")
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is empty")
            return [self.path]

    def _files_of_folder(self) -> list[Path]:
        saved = saved_dataset_files(self.path)
        files = list_files(self.path, lambda name: not name.startswith(".")) if saved is None else saved
        if not files:
            raise ValueError(f"the folder {self.path} holds no files")
        return files


@dataclass(frozen=True)
class _StdlibSource:
    """The standard library's .py files, without installed packages, tests and files written by its build."""

    _EXCLUDED: ClassVar = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    _GENERATED_PREFIXES: ClassVar = ("config-", "_sysconfigdata")  # these differ between machines

    def read_documents(self, config: SourceConfig, excluded: _Excluded) -> Iterator[TextChunk]:
        config.require_text(STDLIB_SOURCE)
        root = self._root()
        for file in self._files():
            try:
                text = file.read_bytes().decode()
            except UnicodeDecodeError:
                continue  # a few files are written in other encodings on purpose
            yield from chunk_document(text, f"{STDLIB_SOURCE}/{file.relative_to(root).as_posix()}")

    def read_rows(self, options: ColumnOptions) -> NoReturn:
        raise ValueError(f"{STDLIB_SOURCE} is text without columns, and no table")

    def fingerprint(self) -> str:
        version = ".".join(map(str, sys.version_info[:3]))
        return f"Python {version} sha256:{sha256_of_files(self._root(), self._files())}"

    def file_stats(self) -> list[str]:
        return []

    def text_bytes(self) -> int:
        return _total_size(self._files())

    def _root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    def _files(self) -> list[Path]:
        files = list_files(
            self._root(), lambda name: name not in self._EXCLUDED and not name.startswith(self._GENERATED_PREFIXES)
        )
        files = [file for file in files if file.suffix == ".py"]
        if not files:
            raise ValueError(f"this Python has no standard library sources in {self._root()}")
        return files


@dataclass(frozen=True)
class _HubSource:
    """A dataset of the hub, or a local dataset folder."""

    dataset: HubDataset

    def read_documents(self, config: SourceConfig, excluded: _Excluded) -> Iterator[TextChunk]:
        record_format = config.record_format
        for location, _, values in self.dataset.values([record_format.columns]):
            yield from record_format.to_chunks(values, location)

    def read_rows(self, options: ColumnOptions) -> Iterator[tuple[str, tuple[str, ...], Sequence[Any]]]:
        return self.dataset.values(options)

    def fingerprint(self) -> str:
        dataset, path = self.dataset, Path(self.dataset.name)
        # The hash of a local dataset's builder depends on modification times, and not on contents.
        digest = _FileSource(path).fingerprint() if path.is_dir() else dataset.builder_hash()
        return f"hub {dataset.name} config:{dataset.config} split:{dataset.split} fingerprint:{digest}"

    def file_stats(self) -> list[str]:
        return []

    def text_bytes(self) -> None:
        return None


_Source: TypeAlias = _FileSource | _RegionSource | _StdlibSource | _HubSource


def _parse_source(name: str) -> _Source:
    if name == STDLIB_SOURCE:
        return _StdlibSource()
    if not name.startswith(HUB_PREFIX):
        return _parse_region_source(name) or _FileSource(Path(name))
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
    return _HubSource(HubDataset(dataset, config or None, split))


def _parse_region_source(name: str) -> _RegionSource | None:
    """A FASTA file with a region after a colon; None for other names, and for files whose names have colons."""
    is_bed = _BED_REGION.fullmatch(name) is not None
    if ":" not in name and not is_bed:
        return None
    with os_errors_as_value_error(Path(name), "read"):
        exists = Path(name).exists()
    if exists:
        if is_bed:
            raise ValueError(f"{name} names regions of a FASTA file: write genome.fa:{name}, with that file in front")
        return None
    for colon in re.finditer(":", name):
        file = Path(name[: colon.start()])
        if format_suffix(file)[0] in FASTA_SUFFIXES:
            region = name[colon.end() :]
            if not region:
                raise ValueError(f"a region is written {file}:CONTIG or {file}:CONTIG:FIRST-LAST; got {name!r}")
            return _RegionSource(file, region)
    return None


def _real(file: Path) -> str:
    return os.path.realpath(file)


def _total_size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)
