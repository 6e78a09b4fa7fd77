"""Text to a folder of token ids that training maps into memory, and back.

train-00000.bin ...   ids, uint16 or uint32, little-endian
train.document_ends.bin        where each document ends, int64
train.prompt_lengths.bin       of pairs: how many tokens of each document are its prompt, int64
valid-00000.bin ...   the same, held out
tokenizer.json
manifest.json         written last
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unmask.data.corpus.build import TOKENIZER_FILE, TRAIN_SPLIT, CorpusBuild, ProgressFn
from unmask.data.corpus.manifest import CORPUS_FORMAT, MANIFEST_FILE, Manifest, PrepareConfig
from unmask.data.corpus.token_files import (
    INDEX_DTYPE,
    FileRecord,
    Split,
    SplitRecord,
    merge_document_ends,
    merge_prompt_lengths,
    verify_checksums,
)
from unmask.data.text_stats import TextStats
from unmask.data.tokenizers.tokenizer import Tokenizer
from unmask.data.tokenizers.unknown_stats import UnknownStats
from unmask.io import atomic as folders

if TYPE_CHECKING:
    from unmask.types import Vocab

__all__ = ["Corpus", "PrepareConfig", "Split", "is_corpus", "merge_shards", "prepare", "stale_reasons"]

_SHARD_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)")
_CORPUS_FILES = re.compile(
    r"(train|valid)(-\d{5,}|\.document_ends|\.prompt_lengths)\.bin|tokenizer\.json|manifest\.json"
)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: concatenated documents, each followed by the separator if the tokenizer has one."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True) -> Corpus:
        """Read a corpus folder, whose files must all be there in full, and as they were written.

        Without `verify`, the SHA-256 of the ids is not looked at: for those who will not read them, or who
        have somebody else do it.
        """
        path = Path(folder)
        manifest = Manifest.read(path)
        itemsize = np.dtype(manifest.dtype).itemsize
        for split in manifest.splits:
            for numbers in split.document_files:
                numbers.check_size(path, INDEX_DTYPE.itemsize)
            for shard in split.token_files:
                shard.check_size(path, itemsize)
        corpus = cls(path, manifest, _read_tokenizer(path, manifest))
        if verify:
            corpus.verify()
        return corpus

    def verify(self, *splits: str) -> None:
        """Refuse damaged ids by the name of their file: of these splits, or of all."""
        wanted = [split for split in self.manifest.splits if not splits or split.name in splits]
        records = [record for split in wanted for record in (*split.document_files, *split.token_files)]
        verify_checksums(self.folder, records)

    @property
    def vocab(self) -> Vocab:
        """The tokenizer's ids and, after them, the mask."""
        from unmask.types import Vocab  # torch takes a second to import, and preparing does not need it

        return Vocab(size=self.tokenizer.vocab_size + 1, mask_id=self.tokenizer.vocab_size, eos_id=self.eos_id)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        return self.manifest.tokenizer.eos_id

    @property
    def digest(self) -> str:
        """Equal for corpora of the same ids and tokenizer, wherever they lie and came from."""
        return self.manifest.digest

    @cached_property
    def splits(self) -> dict[str, Split]:
        """`train` and, if a share was asked for, `valid`."""
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        return {record.name: Split(self.folder, dtype, record) for record in self.manifest.splits}


def is_corpus(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is a prepared corpus (and not one of text that happens to hold a manifest).

    One whose manifest is damaged is one, too: it is to be refused, not read as text.
    """
    path = Path(folder)
    try:
        Manifest.read(path)
    except ValueError:
        return (path / MANIFEST_FILE).is_file() and (path / f"{TRAIN_SPLIT}.document_ends.bin").is_file()
    return True


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: str = "bytes",
    config: PrepareConfig = PrepareConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Corpus:
    """Make the corpus folder `out` from sources; `progress` is told the bytes of text done so far.

    A corpus that is there already is returned at once if preparing would give it again: if its format, the
    contents of the sources, the options and the tokenizer are the same (see `CorpusBuild.matches`). If
    anything differs, it is replaced. `out` changes at the very end and at one stroke: a run that fails or
    is killed leaves it as it was, and the next one sweeps up. Processes that prepare the same folder wait
    for each other.

    With `prepare.shard` = (i, n), every n-th document goes to `out/shard-i-of-n`, and whoever finishes the
    last part joins them; until then, the part is returned.
    """
    path = Path(os.path.realpath(out))  # a link is followed, not replaced
    request = CorpusBuild.create(sources, tokenizer, config)
    with _io_errors_as_value_error(path):
        if config.shard is None:
            return _prepare_unsharded(request, path, progress)
        return _prepare_shard(request, path, config.shard, progress)


def stale_reasons(
    sources: Sequence[str], out: str | os.PathLike[str], tokenizer: str, config: PrepareConfig
) -> list[str]:
    """What has changed since the corpus `out` was prepared, so that preparing would replace it."""
    request, manifest = CorpusBuild.create(sources, tokenizer, config), Manifest.read(Path(out))
    if request.matches(replace(manifest, format=CORPUS_FORMAT)):  # one of an older format is good for its run
        return []
    changed = [f"the text of {source.name}" for source in request.sources if source not in manifest.sources]
    return changed or ["the tokenizer, the options or the format"]


def merge_shards(out: str | os.PathLike[str]) -> Corpus:
    """Make one corpus of the parts in `out`: their files stay where they are, and one manifest lists them.

    Parts of other sources, tokenizers or options than the first are refused.
    """
    path = Path(os.path.realpath(out))
    with _io_errors_as_value_error(path), folders.file_lock(path):
        return _merge(path, _all_shard_folders(path))


@contextmanager
def _io_errors_as_value_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def _prepare_unsharded(build: CorpusBuild, path: Path, progress: ProgressFn | None) -> Corpus:
    found = _open_if_matching(build, path)
    if found is not None:
        return found
    with folders.file_lock(path) as alone:
        found = _open_if_matching(build, path)  # another process may have made it meanwhile
        if found is not None:
            return found
        _check_replaceable(path)
        with folders.atomic_folder(path, alone) as fresh:
            build.write(fresh, progress)
    return Corpus.open(path, verify=False)  # as it was written just now


def _prepare_shard(build: CorpusBuild, path: Path, shard: tuple[int, int], progress: ProgressFn | None) -> Corpus:
    i, n = shard
    _check_shards(path, n)
    part = path / f"shard-{i}-of-{n}"
    corpus = _open_if_matching(build, part)
    if corpus is None:
        with folders.file_lock(part) as alone, folders.atomic_folder(part, alone) as fresh:
            build.write(fresh, progress)
            (path / MANIFEST_FILE).unlink(missing_ok=True)  # it would list files that are about to go
        corpus = Corpus.open(part, verify=False)  # as it was written just now
    every = [path / f"shard-{i}-of-{n}" for i in range(n)]
    return _open_if_merged(path, every) or _merge_if_complete(path, every) or corpus


def _merge_if_complete(path: Path, shards: list[Path]) -> Corpus | None:
    """The joined corpus, if the parts are all there and made from the same; else there is to be none."""
    with folders.file_lock(path):
        try:
            return _merge(path, shards)
        except ValueError:  # somebody has still to prepare a part, or to prepare it again
            (path / MANIFEST_FILE).unlink(missing_ok=True)
            return None


def _open_if_merged(path: Path, shards: list[Path]) -> Corpus | None:
    """The joined corpus, if it is of these parts as they are now."""
    try:
        joined = Corpus.open(path, verify=False)  # its parts were, or will be when they are asked for
        each = [Corpus.open(part, verify=False) for part in shards]
    except ValueError:
        return None
    now = {name: _merged_token_files(each, name) for name in each[0].splits}
    return joined if {name: split.record.token_files for name, split in joined.splits.items()} == now else None


def _merge(path: Path, shard_folders: list[Path]) -> Corpus:
    parts = [Corpus.open(part, verify=False) for part in shard_folders]  # of ids, the sums go along
    for part in parts:
        verify_checksums(part.folder, [file for split in part.manifest.splits for file in split.document_files])
    first = parts[0].manifest
    for part in parts[1:]:
        difference = _shard_mismatch(first, part.manifest)
        if difference:
            raise ValueError(f"{part.folder} has other {difference} than {parts[0].folder.name}; prepare it again")
    splits = tuple(_merge_split(path, name, parts) for name in parts[0].splits)
    unknown = sum((part.manifest.unknown for part in parts), UnknownStats())
    joined = replace(first, prepare=first.prepare.unsharded, num_shards=len(parts), splits=splits, unknown=unknown)
    with folders.atomic_file(path / TOKENIZER_FILE) as file:
        file.write_bytes((parts[0].folder / TOKENIZER_FILE).read_bytes())
    with folders.atomic_file(path / MANIFEST_FILE) as file:
        joined.write(file)
    return Corpus.open(path)


def _open_if_matching(build: CorpusBuild, path: Path) -> Corpus | None:
    """What is there, if it is whole and what the request would make."""
    try:
        corpus = Corpus.open(path)
    except ValueError:
        return None
    return corpus if build.matches(corpus.manifest) else None


def _check_replaceable(path: Path) -> None:
    """Refuse to replace what is not a corpus."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    if _find_shards(path):
        raise ValueError(f"{path} holds a corpus in parts; remove it or choose another folder")
    foreign = next((entry.name for entry in path.iterdir() if not _CORPUS_FILES.fullmatch(entry.name)), None)
    if foreign is not None:
        raise ValueError(f"{path} holds {foreign}, which is not of a corpus; choose another folder")


def _check_shards(path: Path, n: int) -> None:
    """Refuse to put a part of n where something else is."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    counts = {of for of, _ in _find_shards(path)}
    if counts - {n}:
        raise ValueError(f"{path} holds parts of {max(counts - {n})}; remove them or choose another folder")
    if not counts and (path / MANIFEST_FILE).exists():
        raise ValueError(f"{path} holds a corpus that was not prepared in parts; remove it or choose another folder")


def _find_shards(path: Path) -> list[tuple[int, int]]:
    """(n, i) of each part i of n that is there."""
    names = [_SHARD_FOLDER.fullmatch(entry.name) for entry in path.iterdir()] if path.is_dir() else []
    return sorted((int(name[2]), int(name[1])) for name in names if name)


def _all_shard_folders(path: Path) -> list[Path]:
    """The folders of all parts, which must be complete."""
    found = _find_shards(path)
    if not found:
        raise ValueError(f"{path} has no parts to join; prepare them with a shard (i, n)")
    n = found[-1][0]
    missing = [f"shard-{i}-of-{n}" for i in range(n) if (n, i) not in found]
    if missing:
        raise ValueError(f"{path} is incomplete: it has no {', '.join(missing)} yet")
    return [path / f"shard-{i}-of-{n}" for i in range(n)]


def _shard_mismatch(one: Manifest, other: Manifest) -> str:
    """What keeps two parts from being of the same corpus; nothing if they are."""
    if one.format != other.format:
        return "format"
    if [source.fingerprint for source in one.sources] != [source.fingerprint for source in other.sources]:
        return "sources"
    if one.tokenizer.digest != other.tokenizer.digest:
        return "token ids"
    return "options" if one.prepare.unsharded != other.prepare.unsharded else ""


def _merge_split(path: Path, name: str, shards: list[Corpus]) -> SplitRecord:
    splits = [part.splits[name] for part in shards]
    ends, given = f"{name}.document_ends.bin", f"{name}.prompt_lengths.bin"
    with folders.atomic_file(path / ends) as file:
        where = merge_document_ends(splits, file, ends)
    prompts = None
    if splits[0].prompt_lengths is not None:  # so it is in all, whose options are the same
        with folders.atomic_file(path / given) as file:
            prompts = merge_prompt_lengths(splits, file, given)
    return SplitRecord(
        name,
        num_tokens=sum(split.num_tokens for split in splits),
        num_documents=sum(split.num_documents for split in splits),
        text_stats=sum((split.text_stats for split in splits), TextStats()),
        document_ends=where,
        token_files=_merged_token_files(shards, name),
        prompt_lengths=prompts,
    )


def _merged_token_files(shards: list[Corpus], name: str) -> tuple[FileRecord, ...]:
    """The shards of a split of all parts, as seen from the folder that holds the parts."""
    return tuple(
        replace(shard, file=f"{part.folder.name}/{shard.file}")
        for part in shards
        for shard in part.splits[name].record.token_files
    )


def _read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is incomplete: {TOKENIZER_FILE} is missing; prepare it again")
    if hashlib.sha256(file.read_bytes()).hexdigest() != manifest.tokenizer.digest:
        raise ValueError(f"{file} is not the tokenizer this corpus was prepared with; prepare it again")
    return Tokenizer.from_file(file)
