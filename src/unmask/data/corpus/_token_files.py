"""A split on disk: files of token ids, little-endian, and the end of each document."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unmask.data.corpus.text_stats import TextStats
from unmask.data.tokenizers import BaseTokenizer, TokenIds
from unmask.io.checksums import sha256_of_file

_MAX_TOKEN_FILE_BYTES = 1 << 28
INDEX_DTYPE = np.dtype("<i8")

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class FileRecord:
    """A file of `count` integers."""

    file: str
    count: int
    sha256: str

    def __post_init__(self) -> None:
        if Path(self.file).is_absolute() or ".." in Path(self.file).parts:
            raise ValueError(f"{self.file!r} lies outside the corpus folder")

    def check_size(self, folder: Path, itemsize: int) -> None:
        """Raise if the file is missing or has another size."""
        path = folder / self.file
        if not path.is_file():
            raise ValueError(f"{folder} is incomplete: {self.file} is missing; prepare it again")
        expected, actual = self.count * itemsize, path.stat().st_size
        if actual != expected:
            raise ValueError(
                f"{path} is damaged: it has {actual} bytes where the manifest says {expected}; prepare it again"
            )

    def is_intact(self, folder: Path) -> bool:
        """Whether the SHA-256 of the file is that of what was written."""
        return sha256_of_file(folder / self.file) == self.sha256


@dataclass(frozen=True)
class SplitRecord:
    """A split in the manifest. `text_stats` is the size of its text, without separators.

    `prompt_lengths`: tokens of each document's prompt, in a corpus of prompt-completion pairs.
    """

    name: str
    num_tokens: int
    num_documents: int
    text_stats: TextStats
    document_ends: FileRecord
    token_files: tuple[FileRecord, ...]
    prompt_lengths: FileRecord | None = None

    def __post_init__(self) -> None:
        documents = {record.count for record in self.document_files}
        if self.num_tokens != sum(shard.count for shard in self.token_files) or documents != {self.num_documents}:
            raise ValueError(f"the counts of the split {self.name!r} contradict each other; prepare it again")

    @property
    def document_files(self) -> tuple[FileRecord, ...]:
        """The files with one number per document."""
        return (self.document_ends,) if self.prompt_lengths is None else (self.document_ends, self.prompt_lengths)

    def verify(self, folder: Path, *, documents_only: bool = False) -> None:
        """Raise if the SHA-256 of a file is not that in the manifest; files are hashed in parallel threads."""
        records = self.document_files if documents_only else (*self.document_files, *self.token_files)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            intact = threads.map(lambda record: record.is_intact(folder), records)
            for record, is_intact in zip(records, intact, strict=True):
                if not is_intact:
                    raise ValueError(
                        f"{folder / record.file} is damaged: its SHA-256 is not the one in the manifest;"
                        " prepare it again"
                    )


@dataclass(frozen=True)
class Split:
    """The concatenated documents of a split, memory-mapped."""

    folder: Path
    dtype: np.dtype[Any]
    record: SplitRecord
    eos_id: int | None = None
    complement_ids: tuple[int, ...] | None = None
    """Of DNA: the id of each id's complement."""
    unknown_ids: tuple[int, ...] = ()
    """Of DNA: N, and other ids that stand for no base."""

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return self.record.num_tokens

    @property
    def num_documents(self) -> int:
        """Documents; the parts of a document that was divided between splits count separately."""
        return self.record.num_documents

    @property
    def text_stats(self) -> TextStats:
        """The size of the text, without separators."""
        return self.record.text_stats

    @property
    def document_ends(self) -> IntArray:
        """The end of each document (exclusive), its separator included."""
        return _memmap(self.folder / self.record.document_ends.file, INDEX_DTYPE, self.record.document_ends)

    @property
    def prompt_lengths(self) -> IntArray | None:
        """Tokens of each document's prompt; None if documents are not prompt-completion pairs."""
        record = self.record.prompt_lengths
        return None if record is None else _memmap(self.folder / record.file, INDEX_DTYPE, record)

    def read(self, start: int, stop: int) -> IntArray:
        """The ids at start, ..., stop - 1."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start}..{stop} are not within the split's 0..{self.num_tokens}")
        ids = np.empty(stop - start, np.int64)
        first = int(np.searchsorted(self._file_starts, start, side="right")) - 1
        written = 0
        for i in range(first, len(self.record.token_files)):
            if written == len(ids):
                break
            shard = self.record.token_files[i]
            inside = start + written - int(self._file_starts[i])
            part = _memmap(self.folder / shard.file, self.dtype, shard)[inside : inside + len(ids) - written]
            ids[written : written + len(part)] = part
            written += len(part)
        return ids

    @cached_property
    def _file_starts(self) -> IntArray:
        """The index of each file's first token."""
        return np.cumsum([0, *(shard.count for shard in self.record.token_files)], dtype=np.int64)[:-1]


# Every memory map keeps a file open, and a corpus may have more files than a process may open. The record is
# part of the key, so that a corpus that was prepared again is not read from its old files.
@lru_cache(maxsize=128)
def _memmap(path: Path, dtype: np.dtype[Any], record: FileRecord) -> NDArray[Any]:
    if record.count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(record.count,))


class SplitWriter:
    """Writes a split's files into a folder in one pass; `files` closes them after an error.

    `pairs`: also write the prompt length of each document.
    """

    def __init__(
        self, folder: Path, name: str, tokenizer: BaseTokenizer, files: ExitStack, pairs: bool = False
    ) -> None:
        self._folder, self._name, self._files = folder, name, files
        self._num_ids, self._dtype = tokenizer.vocab_size, tokenizer.dtype.newbyteorder("<")
        self._mask_id = tokenizer.vocab_size if tokenizer.mask_id is None else tokenizer.mask_id
        self._new_ids: list[TokenIds] = []
        self._new_document_ends: list[int] = []
        self._new_prompt_lengths: list[int] = []
        self._token_file: ArrayWriter | None = None
        self._token_files: list[FileRecord] = []
        self._document_ends = ArrayWriter(folder / f"{name}.document_ends.bin", files)
        self._prompt_lengths = ArrayWriter(folder / f"{name}.prompt_lengths.bin", files) if pairs else None
        self._tokens = self._last_end = self._prompt_end = 0
        self._bytes = self._characters = self._words = 0

    def append(self, ids: TokenIds, stats: TextStats | None = None) -> None:
        """Continue the document with the ids of a text of this size."""
        self._new_ids.append(ids)
        self._tokens += len(ids)
        if stats is not None:
            self._bytes += stats.bytes
            self._characters += stats.characters
            self._words += stats.words

    def end_prompt(self) -> None:
        """The document's prompt ends here."""
        self._prompt_end = self._tokens

    def end_document(self) -> None:
        """The document ends here, unless it is empty."""
        if self._tokens > self._last_end:
            self._new_document_ends.append(self._tokens)
            self._new_prompt_lengths.append(max(0, self._prompt_end - self._last_end))
            self._last_end = self._tokens

    def flush(self) -> None:
        """Write the appended ids: they may be small views that keep a large array alive."""
        if self._new_ids:
            self._write(np.concatenate(self._new_ids))
        self._document_ends.write(np.array(self._new_document_ends, INDEX_DTYPE))
        if self._prompt_lengths is not None:
            self._prompt_lengths.write(np.array(self._new_prompt_lengths, INDEX_DTYPE))
        self._new_ids, self._new_document_ends, self._new_prompt_lengths = [], [], []

    def close(self) -> SplitRecord:
        """End the last document; return the record of what was written."""
        self.end_document()
        self.flush()
        if self._token_file is not None:
            self._token_files.append(self._token_file.close())
        ends = self._document_ends.close()
        prompt_lengths = None if self._prompt_lengths is None else self._prompt_lengths.close()
        text = TextStats(self._bytes, self._characters, self._words)
        return SplitRecord(self._name, self._tokens, ends.count, text, ends, tuple(self._token_files), prompt_lengths)

    def _write(self, ids: TokenIds) -> None:
        if len(ids) and (int(ids.max()) >= self._num_ids or bool((ids == self._mask_id).any())):
            raise ValueError(
                f"the corpus contains the mask id {self._mask_id}, which marks masked tokens;"
                " use a tokenizer that cannot produce it"
            )
        max_count = _MAX_TOKEN_FILE_BYTES // self._dtype.itemsize
        while len(ids):
            if self._token_file is None:
                path = self._folder / f"{self._name}-{len(self._token_files):05d}.bin"
                self._token_file = ArrayWriter(path, self._files)
            room = max_count - self._token_file.count
            self._token_file.write(ids[:room].astype(self._dtype, copy=False))
            ids = ids[room:]
            if self._token_file.count == max_count:
                self._token_files.append(self._token_file.close())
                self._token_file = None


class ArrayWriter:
    """A file of integers that is hashed while it is written."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self._path = path
        self._handle = files.enter_context(path.open("wb"))
        self._sha256 = hashlib.sha256()
        self.count = 0

    def write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self._handle.write(data)
        self._sha256.update(data)
        self.count += len(array)

    def close(self) -> FileRecord:
        self._handle.close()
        return FileRecord(self._path.name, self.count, self._sha256.hexdigest())
