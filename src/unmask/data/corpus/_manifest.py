"""The manifest of a corpus: where its text came from, how it was encoded, its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.config import from_json, to_json
from unmask.data.corpus._token_files import SplitRecord
from unmask.data.readers import SourceConfig
from unmask.data.tokenizers._unknown_stats import UnknownStats
from unmask.io.untrusted import parse_json, read_bytes

_CORPUS_FORMAT = "unmask-corpus-5"
"""Changes whenever the same sources and config would give other files."""
_DIGEST_FORMAT = "unmask-corpus-2"
"""The format that introduced the digest, and part of it: a new format does not change the digest of old ids."""

MANIFEST_FILE = "manifest.json"
_CHECKSUM_KEY = "sha256"
"""The field with the SHA-256 of the rest of the manifest."""
_MAX_MANIFEST_BYTES = 1 << 28
"""The largest manifest that is read; it names every token file."""


@dataclass(frozen=True)
class PrepareConfig:
    """How a corpus is prepared from text."""

    source: SourceConfig = SourceConfig()
    """How documents are found in files."""
    validation_fraction: float = 0.05
    """The fraction of the text that is held out for validation."""
    shard: tuple[int, int] | None = None
    """(i, n): prepare only shard i of n, counted from 0; the last shard to be prepared merges all of them."""
    allow_unknown: bool = False
    """Accept text of which more than 5 % is unknown to the tokenizer."""
    context_tokens: tuple[str, ...] | None = None
    """Tokens that are read but never predicted or counted; None for the tokenizer's own, N in DNA."""
    first_token: str | None = None
    """A token that is written before every document, such as [CLS]; None for none."""
    valid_sources: tuple[str, ...] = ()
    """Sources that are held out for validation, instead of a fraction of the text; regions of a FASTA file are left
    out of what is learned."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in [0, 1); got {self.validation_fraction}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            i, n = self.shard
            raise ValueError(f"a shard (i, n) needs 0 <= i < n; got ({i}, {n})")

    @property
    def holds_out(self) -> bool:
        """Whether there is a validation split."""
        return bool(self.validation_fraction or self.valid_sources)

    @property
    def unsharded(self) -> PrepareConfig:
        """The config without the shard."""
        return replace(self, shard=None)


@dataclass(frozen=True)
class SourceRecord:
    """A source: its name, and the fingerprint of its contents."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer: its name, the SHA-256 of its JSON, and its ids."""

    name: str
    digest: str
    vocab_size: int
    eos_id: int | None


@dataclass(frozen=True)
class Manifest:
    """Everything about a corpus except its ids.

    `num_shards`: how many shards were merged; their files stay in their folders. `unknown`: characters that the
    tokenizer has no token for.
    """

    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    prepare: PrepareConfig
    dtype: str
    splits: tuple[SplitRecord, ...]
    num_shards: int | None = None
    format: str = _CORPUS_FORMAT
    unknown: UnknownStats = UnknownStats()

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32; got {self.dtype!r}")

    @property
    def digest(self) -> str:
        """The SHA-256 of tokenizer and ids, and not of where they came from."""
        contents: list[object] = [
            _DIGEST_FORMAT,
            self.dtype,
            self.tokenizer.digest,
            self.tokenizer.eos_id,
        ]
        for split in self.splits:
            files = [[record.count, record.sha256] for record in (*split.document_files, *split.token_files)]
            contents += [split.name, split.text_stats.bytes, files]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def write(self, file: Path) -> None:
        """Write it as JSON, with the SHA-256 of everything else in it."""
        plain = json.dumps({**to_json(self), _CHECKSUM_KEY: ""}, indent=2) + "\n"
        empty = f'"{_CHECKSUM_KEY}": ""'
        filled = f'{empty[:-1]}{hashlib.sha256(plain.encode()).hexdigest()}"'
        file.write_text(filled.join(plain.rsplit(empty, 1)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a corpus folder; raises if it is missing, damaged or of another format."""
        file = folder / MANIFEST_FILE
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; `unmask prepare` makes a corpus folder")
        if not file.exists():
            raise ValueError(f"{folder} is not a prepared corpus: it has no {MANIFEST_FILE}")
        written = read_bytes(file, _MAX_MANIFEST_BYTES)
        try:
            data = parse_json(written, MANIFEST_FILE)
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}; prepare it again") from None
        if not isinstance(data, dict) or data.get("format") != _CORPUS_FORMAT:
            raise ValueError(
                f"{file} is not in the format {_CORPUS_FORMAT!r} of this version: prepare the corpus again"
            )
        checksum = data.pop(_CHECKSUM_KEY, None)
        manifest: Manifest = from_json(cls, data, str(file))
        if checksum != hashlib.sha256(written.replace(str(checksum).encode(), b"")).hexdigest():
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one that it states; prepare it again")
        return manifest
