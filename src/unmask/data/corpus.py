"""Text to a folder of token ids that training maps into memory, and back.

train-00000.bin ...   ids, uint16 or uint32, little-endian
train.ends.bin        where each document ends, int64
train.given.bin       of pairs: how many tokens of each document are its prompt, int64
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

from unmask.data import folders
from unmask.data.encoding import TOKENIZER, TRAIN, Progress, Request
from unmask.data.manifest import FORMAT, MANIFEST, Manifest, PrepareOptions
from unmask.data.shards import END_DTYPE, FileRecord, Split, SplitRecord, join_ends, join_given, verify_files
from unmask.data.textsize import TextSize
from unmask.data.tokenizer import Tokenizer
from unmask.data.unknown import Unknown

if TYPE_CHECKING:
    from unmask.types import Vocab

__all__ = ["Corpus", "PrepareOptions", "Split", "is_corpus", "join", "outdated", "prepare"]

_PART = re.compile(r"part-(\d+)-of-(\d+)")
_OURS = re.compile(r"(train|valid)(-\d{5,}|\.ends|\.given)\.bin|tokenizer\.json|manifest\.json")


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
            for numbers in split.by_document:
                numbers.check(path, END_DTYPE.itemsize)
            for shard in split.shards:
                shard.check(path, itemsize)
        corpus = cls(path, manifest, _read_tokenizer(path, manifest))
        if verify:
            corpus.verify()
        return corpus

    def verify(self, *splits: str) -> None:
        """Refuse damaged ids by the name of their file: of these splits, or of all."""
        wanted = [split for split in self.manifest.splits if not splits or split.name in splits]
        records = [record for split in wanted for record in (*split.by_document, *split.shards)]
        verify_files(self.folder, records)

    @property
    def vocab(self) -> Vocab:
        """The tokenizer's ids and, after them, the mask."""
        from unmask.types import Vocab  # torch takes a second to import, and preparing does not need it

        return Vocab(size=self.tokenizer.size + 1, mask=self.tokenizer.size, end=self.separator)

    @property
    def separator(self) -> int | None:
        """The id that ends a document, if there is one."""
        return self.manifest.tokenizer.separator

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
        return (path / MANIFEST).is_file() and (path / f"{TRAIN}.ends.bin").is_file()
    return True


def prepare(
    sources: Sequence[str],
    out: str | os.PathLike[str],
    tokenizer: str = "bytes",
    options: PrepareOptions = PrepareOptions(),  # noqa: B008
    progress: Progress | None = None,
) -> Corpus:
    """Make the corpus folder `out` from sources; `progress` is told the bytes of text done so far.

    A corpus that is there already is returned at once if preparing would give it again: if its format, the
    contents of the sources, the options and the tokenizer are the same (see `Request.is_met_by`). If
    anything differs, it is replaced. `out` changes at the very end and at one stroke: a run that fails or
    is killed leaves it as it was, and the next one sweeps up. Processes that prepare the same folder wait
    for each other.

    With `options.shard` = (i, n), every n-th document goes to `out/part-i-of-n`, and whoever finishes the
    last part joins them; until then, the part is returned.
    """
    path = Path(os.path.realpath(out))  # a link is followed, not replaced
    request = Request.new(sources, tokenizer, options)
    with _explained(path):
        if options.shard is None:
            return _prepare_whole(request, path, progress)
        return _prepare_part(request, path, options.shard, progress)


def outdated(
    sources: Sequence[str], out: str | os.PathLike[str], tokenizer: str, options: PrepareOptions
) -> list[str]:
    """What has changed since the corpus `out` was prepared, so that preparing would replace it."""
    request, manifest = Request.new(sources, tokenizer, options), Manifest.read(Path(out))
    if request.is_met_by(replace(manifest, format=FORMAT)):  # one of an older format is good for its run
        return []
    changed = [f"the text of {source.name}" for source in request.sources if source not in manifest.sources]
    return changed or ["the tokenizer, the options or the format"]


def join(out: str | os.PathLike[str]) -> Corpus:
    """Make one corpus of the parts in `out`: their files stay where they are, and one manifest lists them.

    Parts of other sources, tokenizers or options than the first are refused.
    """
    path = Path(os.path.realpath(out))
    with _explained(path), folders.exclusive(path):
        return _join(path, _complete_parts(path))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None


def _prepare_whole(request: Request, path: Path, progress: Progress | None) -> Corpus:
    found = _matching(request, path)
    if found is not None:
        return found
    with folders.exclusive(path) as alone:
        found = _matching(request, path)  # another process may have made it meanwhile
        if found is not None:
            return found
        _check_replaceable(path)
        with folders.replacing(path, alone) as fresh:
            request.write(fresh, progress)
    return Corpus.open(path, verify=False)  # as it was written just now


def _prepare_part(request: Request, path: Path, shard: tuple[int, int], progress: Progress | None) -> Corpus:
    i, n = shard
    _check_parts(path, n)
    part = path / f"part-{i}-of-{n}"
    corpus = _matching(request, part)
    if corpus is None:
        with folders.exclusive(part) as alone, folders.replacing(part, alone) as fresh:
            request.write(fresh, progress)
            (path / MANIFEST).unlink(missing_ok=True)  # it would list files that are about to go
        corpus = Corpus.open(part, verify=False)  # as it was written just now
    every = [path / f"part-{i}-of-{n}" for i in range(n)]
    return _already_joined(path, every) or _join_if_complete(path, every) or corpus


def _join_if_complete(path: Path, parts: list[Path]) -> Corpus | None:
    """The joined corpus, if the parts are all there and made from the same; else there is to be none."""
    with folders.exclusive(path):
        try:
            return _join(path, parts)
        except ValueError:  # somebody has still to prepare a part, or to prepare it again
            (path / MANIFEST).unlink(missing_ok=True)
            return None


def _already_joined(path: Path, parts: list[Path]) -> Corpus | None:
    """The joined corpus, if it is of these parts as they are now."""
    try:
        joined = Corpus.open(path, verify=False)  # its parts were, or will be when they are asked for
        each = [Corpus.open(part, verify=False) for part in parts]
    except ValueError:
        return None
    now = {name: _joined_shards(each, name) for name in each[0].splits}
    return joined if {name: split.record.shards for name, split in joined.splits.items()} == now else None


def _join(path: Path, folders_of_parts: list[Path]) -> Corpus:
    parts = [Corpus.open(part, verify=False) for part in folders_of_parts]  # of ids, the sums go along
    for part in parts:
        verify_files(part.folder, [file for split in part.manifest.splits for file in split.by_document])
    first = parts[0].manifest
    for part in parts[1:]:
        difference = _difference(first, part.manifest)
        if difference:
            raise ValueError(
                f"{part.folder} has other {difference} than {parts[0].folder.name}; prepare it again"
            )
    splits = tuple(_join_split(path, name, parts) for name in parts[0].splits)
    unknown = sum((part.manifest.unknown for part in parts), Unknown())
    joined = replace(first, options=first.options.whole, parts=len(parts), splits=splits, unknown=unknown)
    with folders.replacing_file(path / TOKENIZER) as file:
        file.write_bytes((parts[0].folder / TOKENIZER).read_bytes())
    with folders.replacing_file(path / MANIFEST) as file:
        joined.write(file)
    return Corpus.open(path)


def _matching(request: Request, path: Path) -> Corpus | None:
    """What is there, if it is whole and what the request would make."""
    try:
        corpus = Corpus.open(path)
    except ValueError:
        return None
    return corpus if request.is_met_by(corpus.manifest) else None


def _check_replaceable(path: Path) -> None:
    """Refuse to replace what is not a corpus."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    if _parts(path):
        raise ValueError(f"{path} holds a corpus in parts; remove it or choose another folder")
    foreign = next((entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name)), None)
    if foreign is not None:
        raise ValueError(f"{path} holds {foreign}, which is not of a corpus; choose another folder")


def _check_parts(path: Path, n: int) -> None:
    """Refuse to put a part of n where something else is."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    counts = {of for of, _ in _parts(path)}
    if counts - {n}:
        raise ValueError(f"{path} holds parts of {max(counts - {n})}; remove them or choose another folder")
    if not counts and (path / MANIFEST).exists():
        raise ValueError(
            f"{path} holds a corpus that was not prepared in parts; remove it or choose another folder"
        )


def _parts(path: Path) -> list[tuple[int, int]]:
    """(n, i) of each part i of n that is there."""
    names = [_PART.fullmatch(entry.name) for entry in path.iterdir()] if path.is_dir() else []
    return sorted((int(name[2]), int(name[1])) for name in names if name)


def _complete_parts(path: Path) -> list[Path]:
    """The folders of all parts, which must be complete."""
    found = _parts(path)
    if not found:
        raise ValueError(f"{path} has no parts to join; prepare them with a shard (i, n)")
    n = found[-1][0]
    missing = [f"part-{i}-of-{n}" for i in range(n) if (n, i) not in found]
    if missing:
        raise ValueError(f"{path} is incomplete: it has no {', '.join(missing)} yet")
    return [path / f"part-{i}-of-{n}" for i in range(n)]


def _difference(one: Manifest, other: Manifest) -> str:
    """What keeps two parts from being of the same corpus; nothing if they are."""
    if one.format != other.format:
        return "format"
    if [source.identity for source in one.sources] != [source.identity for source in other.sources]:
        return "sources"
    if one.tokenizer.digest != other.tokenizer.digest:
        return "token ids"
    return "options" if one.options.whole != other.options.whole else ""


def _join_split(path: Path, name: str, parts: list[Corpus]) -> SplitRecord:
    splits = [part.splits[name] for part in parts]
    ends, given = f"{name}.ends.bin", f"{name}.given.bin"
    with folders.replacing_file(path / ends) as file:
        where = join_ends(splits, file, ends)
    prompts = None
    if splits[0].given is not None:  # so it is in all, whose options are the same
        with folders.replacing_file(path / given) as file:
            prompts = join_given(splits, file, given)
    return SplitRecord(
        name,
        tokens=sum(split.tokens for split in splits),
        documents=sum(split.documents for split in splits),
        text=sum((split.text for split in splits), TextSize()),
        ends=where,
        shards=_joined_shards(parts, name),
        given=prompts,
    )


def _joined_shards(parts: list[Corpus], name: str) -> tuple[FileRecord, ...]:
    """The shards of a split of all parts, as seen from the folder that holds the parts."""
    return tuple(
        replace(shard, file=f"{part.folder.name}/{shard.file}")
        for part in parts
        for shard in part.splits[name].record.shards
    )


def _read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    file = folder / TOKENIZER
    if not file.is_file():
        raise ValueError(f"{folder} is incomplete: {TOKENIZER} is missing; prepare it again")
    if hashlib.sha256(file.read_bytes()).hexdigest() != manifest.tokenizer.digest:
        raise ValueError(f"{file} is not the tokenizer this corpus was prepared with; prepare it again")
    return Tokenizer.from_file(file)
