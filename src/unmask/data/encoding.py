"""Documents to a corpus folder: sample, train a tokenizer if asked, encode, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unmask.data.formats import PIECE
from unmask.data.holdout import Placed, place
from unmask.data.lookup import Ids
from unmask.data.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    PrepareOptions,
    SourceRecord,
    TokenizerRecord,
)
from unmask.data.shards import SplitWriter
from unmask.data.sources import documents, identity, stamp
from unmask.data.textsize import counts
from unmask.data.tokenizer import SMALLEST_BPE, Tokenizer, named
from unmask.data.unknown import Unknown, changed

TOKENIZER = "tokenizer.json"
TRAIN, VALID = "train", "valid"

BATCH = 16 * PIECE
"""Characters that are encoded at a time: enough for all cores, and little to hold."""

MOST_SAMPLED, SAMPLED_PER_TOKEN = 64 << 20, 1 << 10
"""Characters that a BPE vocabulary is trained on: at most, and for each of its tokens."""

TRIED = 4096
"""Characters that are decoded again, to see whether the tokenizer keeps a text as it is."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Request:
    """What is to be prepared. `tokenizer` is None if it is to be trained: a BPE of `bpe_size` tokens."""

    sources: tuple[SourceRecord, ...]
    stamp: tuple[str, ...]
    name: str
    tokenizer: Tokenizer | None
    bpe_size: int
    options: PrepareOptions

    @classmethod
    def new(cls, sources: Sequence[str], tokenizer: str, options: PrepareOptions) -> Request:
        """Read the sources once to say what they are."""
        if not sources:
            raise ValueError("a corpus needs at least one source, for instance stdlib")
        size = _bpe_size(tokenizer)
        known = None if size else named(tokenizer)
        if options.source.pairs is not None and known is not None and known.separator is None:
            raise ValueError(f"the tokenizer {tokenizer} has no id that ends a text, which pairs need")
        before = stamp(sources)
        what = identity(sources)
        records = tuple(SourceRecord(name, what[name]) for name in sources)
        return cls(records, before, tokenizer, known, size, options)

    def is_met_by(self, manifest: Manifest) -> bool:
        """Whether preparing would give that corpus again: same text, same options, same tokenizer.

        A tokenizer is the same if its JSON is; one that is yet to be trained, if its name is, since training
        is a function of text and options.
        """
        return (
            manifest.format == FORMAT
            and [source.identity for source in manifest.sources] == [s.identity for s in self.sources]
            and manifest.options == self.options
            and (
                manifest.tokenizer.name == self.name
                if self.tokenizer is None
                else manifest.tokenizer.digest == self.tokenizer.digest
            )
        )

    def write(self, folder: Path, progress: Progress | None) -> None:
        """Write all files of the corpus, the manifest last."""
        tokenizer = self.tokenizer or Tokenizer.train_bpe(self._sample(), self.bpe_size)
        (folder / TOKENIZER).write_bytes(tokenizer.to_json().encode())
        with ExitStack() as files:
            pairs = self.options.source.pairs is not None
            train = SplitWriter(folder, TRAIN, tokenizer, files, pairs)
            valid = SplitWriter(folder, VALID, tokenizer, files, pairs) if self.options.share else train
            unknown = self._encode(tokenizer, (train, valid), progress)
            splits = [writer.close() for writer in dict.fromkeys((train, valid))]
        names = [source.name for source in self.sources]
        if stamp(names) != self.stamp:
            raise ValueError(f"{', '.join(names)} changed while it was read; prepare it again")
        record = TokenizerRecord(self.name, tokenizer.digest, tokenizer.size, tokenizer.separator)
        manifest = Manifest(
            self.sources, record, self.options, tokenizer.dtype.name, tuple(splits), unknown=unknown
        )
        manifest.write(folder / MANIFEST)

    def _encode(
        self, tokenizer: Tokenizer, writers: tuple[SplitWriter, SplitWriter], progress: Progress | None
    ) -> Unknown:
        """Write the ids of all documents; what of them is unknown, which may refuse them."""
        separator = np.array([] if tokenizer.separator is None else [tokenizer.separator], tokenizer.dtype)
        before: Placed | None = None
        unknown, done = Unknown(), 0
        for batch in _batches(self._placed(own=True)):
            ids, more = _ids(batch, tokenizer)
            unknown += more if done else replace(more, changed=_changed(batch[0].piece.text, tokenizer))
            self._check(unknown, tokenizer)
            for each in batch:
                piece, writer = each.piece, writers[each.held_out]
                if not each.follows(before):
                    writer.end()
                *given, text = piece.parts
                for prompt in given:
                    done += _write(prompt, False, next(ids), writer)
                    writer.end_prompt()
                done += _write(text, piece.ends, next(ids), writer)
                if piece.ends:
                    writer.add(separator)
                    writer.end()
                before = each
            for writer in writers:
                writer.flush()
            if progress is not None:
                progress(done)
        return unknown

    def _check(self, unknown: Unknown, tokenizer: Tokenizer) -> None:
        if unknown.is_much and not self.options.allow_unknown:
            names = ", ".join(source.name for source in self.sources)
            raise ValueError(
                f"{names}: {tokenizer.refused(unknown)}, or prepare it all the same with --allow-unknown (a"
                " setting: options.allow_unknown=true)"
            )

    def _placed(self, own: bool) -> Iterator[Placed]:
        """The pieces of the whole corpus or, if `own`, of the documents of this shard."""
        pieces = documents([source.name for source in self.sources], self.options.source)
        placed = place(pieces, self.options.share)
        if self.options.shard is None or not own:
            return placed
        i, n = self.options.shard
        return (each for each in placed if each.document % n == i)

    def _sample(self) -> Iterator[str]:
        """Texts to train a tokenizer on: the same for all shards, and nothing that is held out."""
        budget = min(MOST_SAMPLED, SAMPLED_PER_TOKEN * self.bpe_size)
        training = (each.piece for each in self._placed(own=False) if not each.held_out)
        return iter(sample((text for piece in training for text in piece.parts), budget))


def sample(texts: Iterable[str], budget: int) -> list[str]:
    """At most `budget` characters, evenly from all texts whatever their number, in one pass."""
    kept: list[tuple[int, str]] = []
    size, limit = 0, 1 << 64
    for number, text in enumerate(texts):
        rank = number * 0xD1B54A32D192ED03 % (1 << 64)  # an irrational share of a turn: ranks spread evenly
        if rank >= limit:
            continue
        kept.append((rank, text))
        size += len(text)
        while size > budget and len(kept) > 1:
            limit //= 2
            kept = [(each, text) for each, text in kept if each < limit]
            size = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def _bpe_size(name: str) -> int:
    """The N of bpe:N; 0 for other tokenizers."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return 0
    if not size.isdecimal() or int(size) < SMALLEST_BPE:
        raise ValueError(f"a BPE tokenizer is named bpe:SIZE with SIZE >= {SMALLEST_BPE}; got {name!r}")
    return int(size)


def _write(text: str, ends: bool, ids: Ids, writer: SplitWriter) -> int:
    """Add a text to its document; the bytes that it has."""
    size = counts(text, ends)
    writer.add(ids, *size)
    return size[0]


def _batches(placed: Iterable[Placed]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    size = 0
    for each in placed:
        batch.append(each)
        size += len(each.piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ids(batch: list[Placed], tokenizer: Tokenizer) -> tuple[Iterator[Ids], Unknown]:
    """The ids of each part of each piece, and what of them is unknown."""
    try:
        ids, unknown = tokenizer.encode_counted([text for each in batch for text in each.piece.parts])
    except ValueError:
        for each in batch:  # slowly again, to say where it was
            try:
                tokenizer.encode_array(each.piece.parts)
            except ValueError as error:
                raise ValueError(f"{each.piece.origin}: {error}") from None
        raise
    return iter(ids), unknown


def _changed(text: str, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """How the beginning of a text is changed by encoding and decoding it, if nothing in it is unknown."""
    start = text[:TRIED]
    (ids,), unknown = tokenizer.encode_counted([start])
    if unknown.unknown or unknown.ambiguous:
        return None
    return changed(start, tokenizer.decode(ids.tolist()))
