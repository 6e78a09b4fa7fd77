"""A corpus prepared in shards, by several processes or machines, and merged by the last one.

Merging copies no ids: one manifest lists the token files of all shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unmask.data.corpus._manifest import MANIFEST_FILE, Manifest
from unmask.data.corpus._token_files import ArrayWriter, FileRecord, IntArray, SplitRecord
from unmask.data.corpus.build import TOKENIZER_FILE, CorpusBuild
from unmask.data.corpus.corpus import Corpus
from unmask.data.corpus.text_stats import TextStats
from unmask.data.tokenizers import UnknownStats
from unmask.io.atomic import atomic_file, atomic_folder
from unmask.io.locks import file_lock

if TYPE_CHECKING:
    from unmask.types import ProgressFn

_SHARD_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)")
_MERGE_CHUNK_SIZE = 1 << 20


def prepare_shard(build: CorpusBuild, path: Path, shard: tuple[int, int], progress: ProgressFn | None) -> Corpus:
    """Prepare one shard; return the merged corpus if this was the last one, else the shard."""
    i, n = shard
    _check_shards(path, n)
    folder = path / f"shard-{i}-of-{n}"
    corpus = open_if_matching(build, folder)
    if corpus is None:
        with file_lock(folder) as locked, atomic_folder(folder, locked) as tmp:
            build.write(tmp, progress)
            (path / MANIFEST_FILE).unlink(missing_ok=True)  # it lists files that are about to be replaced
        corpus = Corpus.open(folder, verify=False, allow_code=build.allow_code)
    folders = [path / f"shard-{j}-of-{n}" for j in range(n)]
    return _open_if_merged(build, path, folders) or _merge_if_complete(build, path, folders) or corpus


def open_if_matching(build: CorpusBuild, path: Path) -> Corpus | None:
    """The corpus in the folder, if it is intact and what `build` would write."""
    try:
        corpus = Corpus.open(path, allow_code=build.allow_code)
    except ValueError:
        return None
    return corpus if build.matches(corpus.manifest) else None


def find_shards(path: Path) -> list[tuple[int, int]]:
    """(n, i) of each shard i of n in the folder."""
    names = [_SHARD_FOLDER.fullmatch(entry.name) for entry in path.iterdir()] if path.is_dir() else []
    return sorted((int(name[2]), int(name[1])) for name in names if name)


def _check_shards(path: Path, n: int) -> None:
    """Raise if the folder holds something else than shards of n."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    others = {count for count, _ in find_shards(path)} - {n}
    if others:
        raise ValueError(f"{path} holds {max(others)} shards, not {n}; remove them or choose another folder")
    if not find_shards(path) and (path / MANIFEST_FILE).exists():
        raise ValueError(f"{path} holds a corpus that was not prepared in shards; remove it or choose another folder")


def _open_if_merged(build: CorpusBuild, path: Path, folders: list[Path]) -> Corpus | None:
    """The merged corpus, if it lists the shards' files as they are now."""
    try:
        merged = Corpus.open(path, verify=False, allow_code=build.allow_code)
        shards = _open_shards(build, folders)
    except ValueError:
        return None
    current = {name: _merged_token_files(shards, name) for name in shards[0].splits}
    return merged if {name: split.record.token_files for name, split in merged.splits.items()} == current else None


def _merge_if_complete(build: CorpusBuild, path: Path, folders: list[Path]) -> Corpus | None:
    """Merge the shards; None (and no manifest) if one is missing, damaged or was prepared otherwise."""
    with file_lock(path):
        try:
            shards = _open_shards(build, folders)
            for shard in shards:
                for split in shard.manifest.splits:
                    split.verify(shard.folder, documents_only=True)  # the ids are verified after the merge
            if all(_is_same_corpus(shards[0].manifest, shard.manifest) for shard in shards):
                _merge(path, shards)
                return Corpus.open(path, allow_code=build.allow_code)
        except ValueError:
            pass
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        return None


def _open_shards(build: CorpusBuild, folders: list[Path]) -> list[Corpus]:
    return [Corpus.open(folder, verify=False, allow_code=build.allow_code) for folder in folders]


def _is_same_corpus(one: Manifest, other: Manifest) -> bool:
    """Whether two shards have the same sources, token ids and config."""
    return (
        [source.fingerprint for source in one.sources] == [source.fingerprint for source in other.sources]
        and one.tokenizer.digest == other.tokenizer.digest
        and one.prepare.unsharded == other.prepare.unsharded
    )


def _merge(path: Path, shards: list[Corpus]) -> None:
    first = shards[0].manifest
    manifest = replace(
        first,
        prepare=first.prepare.unsharded,
        num_shards=len(shards),
        splits=tuple(_merge_split(path, name, shards) for name in shards[0].splits),
        unknown=sum((shard.manifest.unknown for shard in shards), UnknownStats()),
    )
    with atomic_file(path / TOKENIZER_FILE) as file:
        file.write_bytes((shards[0].folder / TOKENIZER_FILE).read_bytes())
    with atomic_file(path / MANIFEST_FILE) as file:
        manifest.write(file)


def _merge_split(path: Path, name: str, shards: list[Corpus]) -> SplitRecord:
    splits = [shard.splits[name] for shard in shards]
    starts = np.cumsum([0, *(split.num_tokens for split in splits)]).tolist()
    ends = [(split.document_ends, start) for split, start in zip(splits, starts, strict=False)]
    prompts = [(split.prompt_lengths, 0) for split in splits if split.prompt_lengths is not None]
    return SplitRecord(
        name,
        num_tokens=sum(split.num_tokens for split in splits),
        num_documents=sum(split.num_documents for split in splits),
        text_stats=sum((split.text_stats for split in splits), TextStats()),
        document_ends=_merge_arrays(ends, path / f"{name}.document_ends.bin"),
        token_files=_merged_token_files(shards, name),
        prompt_lengths=_merge_arrays(prompts, path / f"{name}.prompt_lengths.bin") if prompts else None,
    )


def _merge_arrays(arrays: Sequence[tuple[IntArray, int]], path: Path) -> FileRecord:
    """Concatenate arrays in a file, each with a constant added."""
    with atomic_file(path) as tmp, ExitStack() as files:
        merged = ArrayWriter(tmp, files)
        for array, offset in arrays:
            for start in range(0, len(array), _MERGE_CHUNK_SIZE):
                merged.write(array[start : start + _MERGE_CHUNK_SIZE] + offset)
        record = merged.close()
    return replace(record, file=path.name)


def _merged_token_files(shards: list[Corpus], name: str) -> tuple[FileRecord, ...]:
    """The token files of a split of all shards, relative to the folder of the shards."""
    return tuple(
        replace(record, file=f"{shard.folder.name}/{record.file}")
        for shard in shards
        for record in shard.splits[name].record.token_files
    )
