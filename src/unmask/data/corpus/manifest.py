"""What a prepared corpus says about itself: where its text came from, its encoding, its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.config import from_json, to_json
from unmask.data.corpus.token_files import SplitRecord
from unmask.data.sources import SourceConfig
from unmask.data.tokenizers.unknown_stats import UnknownStats
from unmask.io.untrusted import parse_json, read_bytes

CORPUS_FORMAT = "unmask-corpus-4"
"""Changes whenever the same request would give other files."""
_READABLE_FORMATS = (CORPUS_FORMAT, "unmask-corpus-2")
"""Formats that can still be read: in 2, other documents of small corpora were held out."""

MANIFEST_FILE = "manifest.json"
_CHECKSUM_KEY = "sha256"
"""The field of the manifest that holds the SHA-256 of the manifest without it."""
_MAX_MANIFEST_BYTES = 1 << 28
"""Bytes of a manifest, which names every file that the text came from."""


@dataclass(frozen=True)
class PrepareConfig:
    """How text becomes a corpus."""

    source: SourceConfig = SourceConfig()
    """How documents are found in files."""
    validation_fraction: float = 0.05
    """The part of the text that is held out for validation."""
    shard: tuple[int, int] | None = None
    """(i, n): only every n-th document from the i-th on, i from 0; the n parts join by themselves."""
    allow_unknown: bool = False
    """Text is taken even if much of it is unknown to the tokenizer."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in [0, 1); got {self.validation_fraction}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            i, n = self.shard
            raise ValueError(f"a shard (i, n) needs 0 <= i < n; got ({i}, {n})")

    @property
    def unsharded(self) -> PrepareConfig:
        """The same for all shards."""
        return replace(self, shard=None)


@dataclass(frozen=True)
class SourceRecord:
    """A source as it was named, and what it was."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer as it was named, and what it was."""

    name: str
    digest: str
    vocab_size: int
    eos_id: int | None


@dataclass(frozen=True)
class Manifest:
    """All about a corpus but its ids. `parts`: of how many it was joined; their files stay where they are.

    `unknown`: what of the text the tokenizer has no token for.
    """

    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    prepare: PrepareConfig
    dtype: str
    splits: tuple[SplitRecord, ...]
    num_shards: int | None = None
    format: str = CORPUS_FORMAT
    unknown: UnknownStats = UnknownStats()

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32; got {self.dtype!r}")

    @property
    def digest(self) -> str:
        """The SHA-256 of what a reader gets: tokenizer and ids, and not where they came from."""
        contents: list[object] = [
            _READABLE_FORMATS[-1],
            self.dtype,
            self.tokenizer.digest,
            self.tokenizer.eos_id,
        ]
        for split in self.splits:
            files = [[record.count, record.sha256] for record in (*split.document_files, *split.token_files)]
            contents += [split.name, split.text_stats.bytes, files]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def write(self, file: Path) -> None:
        """As JSON, with the SHA-256 of all that stands there beside it."""
        plain = json.dumps({**to_json(self), _CHECKSUM_KEY: ""}, indent=2) + "\n"
        empty = f'"{_CHECKSUM_KEY}": ""'
        sealed = f'{empty[:-1]}{_sha256(plain.encode())}"'
        file.write_text(sealed.join(plain.rsplit(empty, 1)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a corpus folder; refused if it is missing, damaged or of another format."""
        file = folder / MANIFEST_FILE
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; `unmask prepare` makes a corpus folder")
        if not file.exists():
            raise ValueError(f"{folder} is not a prepared corpus: it has no {MANIFEST_FILE}")
        try:
            written = read_bytes(file, _MAX_MANIFEST_BYTES)
            data = parse_json(written, MANIFEST_FILE)
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}; prepare it again") from None
        if not isinstance(data, dict) or data.get("format") not in _READABLE_FORMATS:
            raise ValueError(f"{file} is not in the format {CORPUS_FORMAT!r} that is known here; prepare it again")
        seal = data.pop(_CHECKSUM_KEY, None)  # which corpora of earlier versions lack
        manifest: Manifest = from_json(cls, data, str(file))
        if seal is not None and seal != _sha256(written.replace(str(seal).encode(), b"")):
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one that it states; prepare it again")
        return manifest


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
