"""Prepare a corpus folder from text sources, unless it is up to date."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unmask.data.corpus._manifest import Manifest, PrepareConfig
from unmask.data.corpus._shards import find_shards, open_if_matching, prepare_shard
from unmask.data.corpus.build import CorpusBuild
from unmask.data.corpus.corpus import Corpus
from unmask.data.readers import Sources
from unmask.data.tokenizers import BaseTokenizer
from unmask.io.atomic import atomic_folder
from unmask.io.errors import os_errors_as_value_error
from unmask.io.locks import file_lock

if TYPE_CHECKING:
    from unmask.types import ProgressFn

_CORPUS_FILES = re.compile(
    r"(train|valid)(-\d{5,}|\.document_ends|\.prompt_lengths)\.bin|tokenizer\.json|manifest\.json"
)


def prepare(
    sources: Sequence[str] | Sources,
    out: str | os.PathLike[str],
    tokenizer: str | BaseTokenizer = "bytes",
    config: PrepareConfig = PrepareConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Corpus:
    """Prepare the corpus folder `out`; `progress` is called with the bytes of text done so far.

    An existing corpus is returned at once if it is up to date: the contents of the sources, the config and the
    tokenizer are the same (see `CorpusBuild.matches`). Otherwise it is replaced. `out` is replaced at the end,
    by renaming: a run that fails or is killed leaves it unchanged, and the next run removes its temporary
    files. Processes that prepare the same folder wait for each other.

    With `config.shard` = (i, n), every n-th document goes to `out/shard-i-of-n`. The process that finishes the
    last shard merges all of them; until then, the shard is returned.

    `tokenizer` is a name for `get_tokenizer`, bpe:SIZE to train one, or an object. A `Sources` object is hashed
    once, however often it is passed to `prepare` and `stale_reasons`.
    """
    path = Path(os.path.realpath(out))  # a link is followed, not replaced
    build = CorpusBuild.create(sources, tokenizer, config)
    with os_errors_as_value_error(path, "written"):
        if config.shard is None:
            return _prepare_unsharded(build, path, progress)
        return prepare_shard(build, path, config.shard, progress)


def stale_reasons(
    sources: Sequence[str] | Sources,
    out: str | os.PathLike[str],
    tokenizer: str | BaseTokenizer,
    config: PrepareConfig,
) -> list[str]:
    """What changed since the corpus `out` was prepared; empty if `prepare` would return it as it is."""
    build, manifest = CorpusBuild.create(sources, tokenizer, config), Manifest.read(Path(out))
    if build.matches(manifest):
        return []
    changed = [f"the text of {source.name}" for source in build.source_records if source not in manifest.sources]
    return changed or ["the tokenizer or the config"]


def _prepare_unsharded(build: CorpusBuild, path: Path, progress: ProgressFn | None) -> Corpus:
    corpus = open_if_matching(build, path)
    if corpus is not None:
        return corpus
    with file_lock(path) as locked:
        corpus = open_if_matching(build, path)  # another process may have prepared it in the meantime
        if corpus is not None:
            return corpus
        _check_replaceable(path)
        with atomic_folder(path, locked) as tmp:
            build.write(tmp, progress)
    return Corpus.open(path, verify=False, allow_code=build.allow_code)


def _check_replaceable(path: Path) -> None:
    """Raise if the path is something else than a corpus."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder")
    if find_shards(path):
        raise ValueError(f"{path} holds a corpus in shards; remove it or choose another folder")
    foreign = next((entry.name for entry in path.iterdir() if not _CORPUS_FILES.fullmatch(entry.name)), None)
    if foreign is not None:
        raise ValueError(f"{path} holds {foreign}, which is not of a corpus; choose another folder")
