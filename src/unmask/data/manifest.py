"""What a prepared corpus says about itself: where its text came from, its encoding, its files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.config import from_json, to_json
from unmask.data.shards import SplitRecord
from unmask.data.sources import SourceOptions
from unmask.data.unknown import Unknown
from unmask.untrusted import parse_json, read_bytes

FORMAT = "unmask-corpus-3"
"""Changes whenever the same request would give other files."""
READABLE = (FORMAT, "unmask-corpus-2")
"""Formats that can still be read: in 2, other documents of small corpora were held out."""

MANIFEST = "manifest.json"
SEAL = "sha256"
"""The field of the manifest that holds the SHA-256 of the manifest without it."""
LARGEST = 1 << 28
"""Bytes of a manifest, which names every file that the text came from."""


@dataclass(frozen=True)
class PrepareOptions:
    """How text becomes a corpus."""

    source: SourceOptions = SourceOptions()
    """How documents are found in files."""
    share: float = 0.05
    """The part of the text that is held out for validation."""
    shard: tuple[int, int] | None = None
    """(i, n): only every n-th document from the i-th on, i from 0; the n parts join by themselves."""
    allow_unknown: bool = False
    """Text is taken even if much of it is unknown to the tokenizer."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"the share of the validation split must be in [0, 1); got {self.share}")
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            i, n = self.shard
            raise ValueError(f"a shard (i, n) needs 0 <= i < n; got ({i}, {n})")

    @property
    def whole(self) -> PrepareOptions:
        """The same for all shards."""
        return replace(self, shard=None)


@dataclass(frozen=True)
class SourceRecord:
    """A source as it was named, and what it was."""

    name: str
    identity: str


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer as it was named, and what it was."""

    name: str
    digest: str
    size: int
    separator: int | None


@dataclass(frozen=True)
class Manifest:
    """All about a corpus but its ids. `parts`: of how many it was joined; their files stay where they are.

    `unknown`: what of the text the tokenizer has no token for.
    """

    sources: tuple[SourceRecord, ...]
    tokenizer: TokenizerRecord
    options: PrepareOptions
    dtype: str
    splits: tuple[SplitRecord, ...]
    parts: int | None = None
    format: str = FORMAT
    unknown: Unknown = Unknown()

    def __post_init__(self) -> None:
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32; got {self.dtype!r}")

    @property
    def digest(self) -> str:
        """The SHA-256 of what a reader gets: tokenizer and ids, and not where they came from."""
        contents: list[object] = [READABLE[-1], self.dtype, self.tokenizer.digest, self.tokenizer.separator]
        for split in self.splits:
            files = [[record.count, record.sha256] for record in (*split.by_document, *split.shards)]
            contents += [split.name, split.text.bytes, files]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def write(self, file: Path) -> None:
        """As JSON, with the SHA-256 of all that stands there beside it."""
        plain = json.dumps({**to_json(self), SEAL: ""}, indent=2) + "\n"
        empty = f'"{SEAL}": ""'
        sealed = f'{empty[:-1]}{_sha256(plain.encode())}"'
        file.write_text(sealed.join(plain.rsplit(empty, 1)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a corpus folder; refused if it is missing, damaged or of another format."""
        file = folder / MANIFEST
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; `unmask prepare` makes a corpus folder")
        if not file.exists():
            raise ValueError(f"{folder} is not a prepared corpus: it has no {MANIFEST}")
        try:
            written = read_bytes(file, LARGEST)
            data = parse_json(written, MANIFEST)
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}; prepare it again") from None
        if not isinstance(data, dict) or data.get("format") not in READABLE:
            raise ValueError(f"{file} is not in the format {FORMAT!r} that is known here; prepare it again")
        seal = data.pop(SEAL, None)  # which corpora of earlier versions lack
        manifest: Manifest = from_json(cls, data, str(file))
        if seal is not None and seal != _sha256(written.replace(str(seal).encode(), b"")):
            raise ValueError(
                f"{file} is damaged: its SHA-256 is not the one that it states; prepare it again"
            )
        return manifest


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
