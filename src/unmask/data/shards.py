"""A split on disk: shards of token ids, little-endian, and where each document ends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unmask.data.lookup import Ids
from unmask.data.textsize import TextSize
from unmask.data.tokenizer import Tokenizer

SHARD_BYTES = 1 << 28
ENDS_AT_A_TIME = 1 << 20
END_DTYPE = np.dtype("<i8")

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class FileRecord:
    """A file of `count` numbers."""

    file: str
    count: int
    sha256: str

    def __post_init__(self) -> None:
        if Path(self.file).is_absolute() or ".." in Path(self.file).parts:
            raise ValueError(f"{self.file!r} lies outside the corpus folder")

    def check(self, folder: Path, itemsize: int) -> None:
        """Refuse a file that is missing or of another size."""
        path = folder / self.file
        if not path.is_file():
            raise ValueError(f"{folder} is incomplete: {self.file} is missing; prepare it again")
        expected, actual = self.count * itemsize, path.stat().st_size
        if actual != expected:
            raise ValueError(
                f"{path} is damaged: it has {actual} bytes where the manifest says {expected};"
                " prepare it again"
            )

    def is_whole(self, folder: Path) -> bool:
        """Whether its contents are what was written."""
        with (folder / self.file).open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest() == self.sha256


def verify_files(folder: Path, records: Sequence[FileRecord]) -> None:
    """Refuse files of another SHA-256, as fast as they can be read: hashing leaves other threads alone."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for record, whole in zip(
            records, threads.map(lambda each: each.is_whole(folder), records), strict=True
        ):
            if not whole:
                raise ValueError(
                    f"{folder / record.file} is damaged: its SHA-256 is not the one in the manifest;"
                    " prepare it again"
                )


@dataclass(frozen=True)
class SplitRecord:
    """What the manifest knows of a split; `text` is the size of its text, without separators.

    `given`: how many tokens of each document are its prompt, in a corpus of pairs.
    """

    name: str
    tokens: int
    documents: int
    text: TextSize
    ends: FileRecord
    shards: tuple[FileRecord, ...]
    given: FileRecord | None = None

    def __post_init__(self) -> None:
        documents = {record.count for record in self.by_document}
        if self.tokens != sum(shard.count for shard in self.shards) or documents != {self.documents}:
            raise ValueError(f"the counts of the split {self.name!r} contradict each other; prepare it again")

    @property
    def by_document(self) -> tuple[FileRecord, ...]:
        """The files with a number for each document."""
        return (self.ends,) if self.given is None else (self.ends, self.given)


@dataclass(frozen=True)
class Split:
    """The documents of a split, one after the other; only what is read is loaded."""

    folder: Path
    dtype: np.dtype[Any]
    record: SplitRecord

    @property
    def tokens(self) -> int:
        """How many there are, separators included."""
        return self.record.tokens

    @property
    def documents(self) -> int:
        """How many there are; the stretches of a document that was cut by the split count each."""
        return self.record.documents

    @property
    def text(self) -> TextSize:
        """The size of the text, without separators."""
        return self.record.text

    @property
    def ends(self) -> Numbers:
        """Where each document ends (exclusive), its separator included."""
        return _mapped(self.folder / self.record.ends.file, END_DTYPE, self.record.ends)

    @property
    def given(self) -> Numbers | None:
        """How many tokens of each document are its prompt; None where documents are no pairs."""
        record = self.record.given
        return None if record is None else _mapped(self.folder / record.file, END_DTYPE, record)

    def read(self, start: int, stop: int) -> Numbers:
        """The ids at start, ..., stop - 1."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"tokens {start}..{stop} are not within the split's 0..{self.tokens}")
        ids = np.empty(stop - start, np.int64)
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        written = 0
        for i in range(first, len(self.record.shards)):
            if written == len(ids):
                break
            shard = self.record.shards[i]
            inside = start + written - int(self._starts[i])
            part = _mapped(self.folder / shard.file, self.dtype, shard)[inside : inside + len(ids) - written]
            ids[written : written + len(part)] = part
            written += len(part)
        return ids

    @cached_property
    def _starts(self) -> Numbers:
        """The number of each shard's first token."""
        return np.cumsum([0, *(shard.count for shard in self.record.shards)], dtype=np.int64)[:-1]


# Every map holds a file open, and a corpus may have more shards than a process may open files. The record is
# part of the key, so that a corpus that was prepared anew is not read from its old files.
@lru_cache(maxsize=128)
def _mapped(path: Path, dtype: np.dtype[Any], record: FileRecord) -> NDArray[Any]:
    if record.count == 0:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(record.count,))


class SplitWriter:
    """Writes a split's files into a folder, in one pass; `files` closes them if it is not finished.

    Of `pairs`, it is kept how much of each document is given.
    """

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, files: ExitStack, pairs: bool = False
    ) -> None:
        self._folder, self._name, self._files = folder, name, files
        self._mask, self._dtype = tokenizer.size, tokenizer.dtype.newbyteorder("<")
        self._new_ids: list[Ids] = []
        self._new_ends: list[int] = []
        self._new_given: list[int] = []
        self._shard: _NumberFile | None = None
        self._shards: list[FileRecord] = []
        self._ends = _NumberFile(folder / f"{name}.ends.bin", files)
        self._given = _NumberFile(folder / f"{name}.given.bin", files) if pairs else None
        self._tokens = self._last_end = self._border = 0
        self._bytes = self._characters = self._words = 0

    def add(self, ids: Ids, size: int = 0, characters: int = 0, words: int = 0) -> None:
        """Go on with the document; `size` is in bytes."""
        self._new_ids.append(ids)
        self._tokens += len(ids)
        self._bytes += size
        self._characters += characters
        self._words += words

    def end_prompt(self) -> None:
        """What was added of the document so far is given."""
        self._border = self._tokens

    def end(self) -> None:
        """The document ends here, if there is one."""
        if self._tokens > self._last_end:
            self._new_ends.append(self._tokens)
            self._new_given.append(max(0, self._border - self._last_end))
            self._last_end = self._tokens

    def flush(self) -> None:
        """Write what was added: it must not wait for long, for it may be a small part of a large array."""
        if self._new_ids:
            self._write(np.concatenate(self._new_ids))
        self._ends.write(np.array(self._new_ends, END_DTYPE))
        if self._given is not None:
            self._given.write(np.array(self._new_given, END_DTYPE))
        self._new_ids, self._new_ends, self._new_given = [], [], []

    def close(self) -> SplitRecord:
        """End the last document and say what was written."""
        self.end()
        self.flush()
        if self._shard is not None:
            self._shards.append(self._shard.close())
        ends = self._ends.close()
        given = None if self._given is None else self._given.close()
        text = TextSize(self._bytes, self._characters, self._words)
        return SplitRecord(self._name, self._tokens, ends.count, text, ends, tuple(self._shards), given)

    def _write(self, ids: Ids) -> None:
        if len(ids) and int(ids.max()) >= self._mask:
            raise ValueError(
                f"the corpus contains the mask id {self._mask}, which stands for a hidden token;"
                " use a tokenizer that cannot produce it"
            )
        longest = SHARD_BYTES // self._dtype.itemsize
        while len(ids):
            if self._shard is None:
                path = self._folder / f"{self._name}-{len(self._shards):05d}.bin"
                self._shard = _NumberFile(path, self._files)
            room = longest - self._shard.count
            self._shard.write(ids[:room].astype(self._dtype, copy=False))
            ids = ids[room:]
            if self._shard.count == longest:
                self._shards.append(self._shard.close())
                self._shard = None


class _NumberFile:
    """A file of numbers that is hashed while it is written."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self._path = path
        self._handle = files.enter_context(path.open("wb"))
        self._sha256 = hashlib.sha256()
        self.count = 0

    def write(self, numbers: NDArray[Any]) -> None:
        data = numbers.tobytes()
        self._handle.write(data)
        self._sha256.update(data)
        self.count += len(numbers)

    def close(self) -> FileRecord:
        self._handle.close()
        return FileRecord(self._path.name, self.count, self._sha256.hexdigest())


def join_ends(splits: Sequence[Split], path: Path, name: str) -> FileRecord:
    """Write where the documents end if the splits follow on one another; `name` is what the file will be."""
    starts = np.cumsum([0, *(split.tokens for split in splits)]).tolist()
    return _joined([(split.ends, start) for split, start in zip(splits, starts, strict=False)], path, name)


def join_given(splits: Sequence[Split], path: Path, name: str) -> FileRecord:
    """Write how much of each document is given if the splits, all of pairs, follow on one another."""
    return _joined([(split.given, 0) for split in splits if split.given is not None], path, name)


def _joined(parts: Sequence[tuple[Numbers, int]], path: Path, name: str) -> FileRecord:
    """Write the numbers of all parts, each with something added to it."""
    with ExitStack() as files:
        joined = _NumberFile(path, files)
        for numbers, more in parts:
            for start in range(0, len(numbers), ENDS_AT_A_TIME):
                joined.write(numbers[start : start + ENDS_AT_A_TIME] + more)
        written = joined.close()
    return FileRecord(name, written.count, written.sha256)
