"""A prepared corpus: a folder of token ids that is memory-mapped for training.

train-00000.bin ...       ids, uint16 or uint32, little-endian
train.document_ends.bin   the end of each document, int64
train.prompt_lengths.bin  prompt-completion pairs only: tokens of each prompt, int64
valid-00000.bin ...       the same for the validation split
tokenizer.json
manifest.json             written last
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unmask.data.corpus._describe import describe_corpus
from unmask.data.corpus._manifest import MANIFEST_FILE, Manifest
from unmask.data.corpus._token_files import INDEX_DTYPE, Split
from unmask.data.corpus.build import TOKENIZER_FILE, TRAIN_SPLIT
from unmask.data.tokenizers import BaseTokenizer, load_tokenizer
from unmask.io.checksums import sha256_of_file
from unmask.registry import AllowCode

if TYPE_CHECKING:
    from unmask.data.loader import RowLayout
    from unmask.types import Vocab


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: concatenated documents, each followed by the tokenizer's EOS token if it has one."""

    folder: Path
    manifest: Manifest
    tokenizer: BaseTokenizer

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, verify: bool = True, allow_code: AllowCode = False) -> Corpus:
        """Open a corpus folder; raises if a file is missing or has another size.

        `verify`: also compare the SHA-256 of every file with the manifest. `allow_code`: which classes of
        tokenizers from outside the package may be imported.
        """
        path = Path(folder)
        manifest = Manifest.read(path)
        itemsize = np.dtype(manifest.dtype).itemsize
        for split in manifest.splits:
            for record in split.document_files:
                record.check_size(path, INDEX_DTYPE.itemsize)
            for record in split.token_files:
                record.check_size(path, itemsize)
        corpus = cls(path, manifest, _read_tokenizer(path, manifest, allow_code))
        if verify:
            corpus.verify()
        return corpus

    def verify(self, *splits: str) -> None:
        """Raise, naming the file, if ids are damaged: of these splits, or of all."""
        for split in self.manifest.splits:
            if not splits or split.name in splits:
                split.verify(self.folder)

    def describe(self, layout: RowLayout | None = None) -> list[str]:
        """Lines to read before training: text held out, unknown characters, pairs that `layout` truncates."""
        return describe_corpus(self, layout)

    @property
    def vocab(self) -> Vocab:
        """The ids of a model of this text: the tokenizer's and, if it has none of its own, the mask."""
        names = self.manifest.prepare.context_tokens
        if names is None:
            return self.tokenizer.model_vocab
        return replace(self.tokenizer.model_vocab, context_ids=self.tokenizer.find_ids(names))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        return self.manifest.tokenizer.eos_id

    @property
    def digest(self) -> str:
        """Equal for corpora with the same ids and tokenizer, wherever they are stored and came from."""
        return self.manifest.digest

    @cached_property
    def splits(self) -> dict[str, Split]:
        """`train` and, if text was held out, `valid`."""
        dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        tokenizer = self.tokenizer
        unknown_ids: tuple[int, ...] = ()
        if tokenizer.complement_ids is not None:
            unknown = [tokenizer.unk_token] if tokenizer.unk_token else []
            unknown_ids = (*tokenizer.context_ids, *tokenizer.find_ids(unknown))
        ids = self.eos_id, tokenizer.complement_ids, unknown_ids
        return {record.name: Split(self.folder, dtype, record, *ids) for record in self.manifest.splits}


def is_corpus(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is a prepared corpus, and not a folder of text that happens to hold a manifest.json.

    True for a corpus with a damaged manifest, too: it must not be read as text.
    """
    path = Path(folder)
    try:
        Manifest.read(path)
    except ValueError:
        return (path / MANIFEST_FILE).is_file() and (path / f"{TRAIN_SPLIT}.document_ends.bin").is_file()
    return True


def _read_tokenizer(folder: Path, manifest: Manifest, allow_code: AllowCode) -> BaseTokenizer:
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise ValueError(f"{folder} is incomplete: {TOKENIZER_FILE} is missing; prepare it again")
    if sha256_of_file(file) != manifest.tokenizer.digest:
        raise ValueError(f"{file} is not the tokenizer this corpus was prepared with; prepare it again")
    return load_tokenizer(file, allow_code=allow_code)
