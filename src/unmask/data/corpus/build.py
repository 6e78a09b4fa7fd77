"""Documents to a corpus folder: sample, train a tokenizer if asked, encode, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unmask.data.corpus.manifest import (
    CORPUS_FORMAT,
    MANIFEST_FILE,
    Manifest,
    PrepareConfig,
    SourceRecord,
    TokenizerRecord,
)
from unmask.data.corpus.splits import SplitChunk, assign_splits
from unmask.data.corpus.token_files import SplitWriter
from unmask.data.readers.text import CHUNK_CHARS
from unmask.data.sources import file_stats, fingerprints, read_documents
from unmask.data.text_stats import count_text
from unmask.data.tokenizers.fast_encoders import TokenIds
from unmask.data.tokenizers.tokenizer import MIN_BPE_VOCAB_SIZE, Tokenizer, get_tokenizer
from unmask.data.tokenizers.unknown_stats import UnknownStats, first_difference

TOKENIZER_FILE = "tokenizer.json"
TRAIN_SPLIT, VALID_SPLIT = "train", "valid"

_BATCH_CHARS = 16 * CHUNK_CHARS
"""Characters that are encoded at a time: enough for all cores, and little to hold."""

_MAX_BPE_CHARS, _BPE_CHARS_PER_TOKEN = 64 << 20, 1 << 10
"""Characters that a BPE vocabulary is trained on: at most, and for each of its tokens."""

_ROUND_TRIP_CHARS = 4096
"""Characters that are decoded again, to see whether the tokenizer keeps a text as it is."""

ProgressFn = Callable[[int], None]


@dataclass(frozen=True)
class CorpusBuild:
    """What is to be prepared. `tokenizer` is None if it is to be trained: a BPE of `bpe_size` tokens."""

    sources: tuple[SourceRecord, ...]
    file_stats: tuple[str, ...]
    tokenizer_name: str
    tokenizer: Tokenizer | None
    bpe_vocab_size: int
    config: PrepareConfig

    @classmethod
    def create(cls, sources: Sequence[str], tokenizer: str, config: PrepareConfig) -> CorpusBuild:
        """Read the sources once to say what they are."""
        if not sources:
            raise ValueError("a corpus needs at least one source, for instance stdlib")
        size = _parse_bpe_size(tokenizer)
        known = None if size else get_tokenizer(tokenizer)
        if config.source.pair_format is not None and known is not None and known.eos_id is None:
            raise ValueError(f"the tokenizer {tokenizer} has no id that ends a text, which pairs need")
        before = file_stats(sources)
        what = fingerprints(sources)
        records = tuple(SourceRecord(name, what[name]) for name in sources)
        return cls(records, before, tokenizer, known, size, config)

    def matches(self, manifest: Manifest) -> bool:
        """Whether preparing would give that corpus again: same text, same options, same tokenizer.

        A tokenizer is the same if its JSON is; one that is yet to be trained, if its name is, since training
        is a function of text and options.
        """
        return (
            manifest.format == CORPUS_FORMAT
            and [source.fingerprint for source in manifest.sources] == [s.fingerprint for s in self.sources]
            and manifest.prepare == self.config
            and (
                manifest.tokenizer.name == self.tokenizer_name
                if self.tokenizer is None
                else manifest.tokenizer.digest == self.tokenizer.digest
            )
        )

    def write(self, folder: Path, progress: ProgressFn | None) -> None:
        """Write all files of the corpus, the manifest last."""
        tokenizer = self.tokenizer or Tokenizer.train_bpe(self._bpe_texts(), self.bpe_vocab_size)
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.to_json().encode())
        with ExitStack() as files:
            pairs = self.config.source.pair_format is not None
            train = SplitWriter(folder, TRAIN_SPLIT, tokenizer, files, pairs)
            valid = (
                SplitWriter(folder, VALID_SPLIT, tokenizer, files, pairs) if self.config.validation_fraction else train
            )
            unknown = self._encode(tokenizer, (train, valid), progress)
            splits = [writer.close() for writer in dict.fromkeys((train, valid))]
        names = [source.name for source in self.sources]
        if file_stats(names) != self.file_stats:
            raise ValueError(f"{', '.join(names)} changed while it was read; prepare it again")
        record = TokenizerRecord(self.tokenizer_name, tokenizer.digest, tokenizer.vocab_size, tokenizer.eos_id)
        manifest = Manifest(self.sources, record, self.config, tokenizer.dtype.name, tuple(splits), unknown=unknown)
        manifest.write(folder / MANIFEST_FILE)

    def _encode(
        self, tokenizer: Tokenizer, writers: tuple[SplitWriter, SplitWriter], progress: ProgressFn | None
    ) -> UnknownStats:
        """Write the ids of all documents; what of them is unknown, which may refuse them."""
        separator = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], tokenizer.dtype)
        before: SplitChunk | None = None
        unknown, done = UnknownStats(), 0
        for batch in _batches(self._split_chunks(this_shard=True)):
            ids, more = _encode_batch(batch, tokenizer)
            unknown += (
                more
                if done
                else replace(more, round_trip_difference=_round_trip_difference(batch[0].chunk.text, tokenizer))
            )
            self._check_unknown(unknown, tokenizer)
            for each in batch:
                piece, writer = each.chunk, writers[each.held_out]
                if not each.continues(before):
                    writer.end_document()
                *given, text = piece.segments
                for prompt in given:
                    done += _add_text(prompt, False, next(ids), writer)
                    writer.end_prompt()
                done += _add_text(text, piece.is_last, next(ids), writer)
                if piece.is_last:
                    writer.append(separator)
                    writer.end_document()
                before = each
            for writer in writers:
                writer.flush()
            if progress is not None:
                progress(done)
        return unknown

    def _check_unknown(self, unknown: UnknownStats, tokenizer: Tokenizer) -> None:
        if unknown.exceeds_limit and not self.config.allow_unknown:
            names = ", ".join(source.name for source in self.sources)
            raise ValueError(
                f"{names}: {tokenizer.unknown_text_message(unknown)}, or prepare it all the same with --allow-unknown"
                " (a"
                " setting: prepare.allow_unknown=true)"
            )

    def _split_chunks(self, this_shard: bool) -> Iterator[SplitChunk]:
        """The pieces of the whole corpus or, if `own`, of the documents of this shard."""
        pieces = read_documents([source.name for source in self.sources], self.config.source)
        placed = assign_splits(pieces, self.config.validation_fraction)
        if self.config.shard is None or not this_shard:
            return placed
        i, n = self.config.shard
        return (each for each in placed if each.document_index % n == i)

    def _bpe_texts(self) -> Iterator[str]:
        """Texts to train a tokenizer on: the same for all shards, and nothing that is held out."""
        budget = min(_MAX_BPE_CHARS, _BPE_CHARS_PER_TOKEN * self.bpe_vocab_size)
        training = (each.chunk for each in self._split_chunks(this_shard=False) if not each.held_out)
        return iter(_subsample((text for piece in training for text in piece.segments), budget))


def _subsample(texts: Iterable[str], max_chars: int) -> list[str]:
    """At most `budget` characters, evenly from all texts whatever their number, in one pass."""
    kept: list[tuple[int, str]] = []
    size, limit = 0, 1 << 64
    for number, text in enumerate(texts):
        rank = number * 0xD1B54A32D192ED03 % (1 << 64)  # an irrational share of a turn: ranks spread evenly
        if rank >= limit:
            continue
        kept.append((rank, text))
        size += len(text)
        while size > max_chars and len(kept) > 1:
            limit //= 2
            kept = [(each, text) for each, text in kept if each < limit]
            size = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def _parse_bpe_size(name: str) -> int:
    """The N of bpe:N; 0 for other tokenizers."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return 0
    if not size.isdecimal() or int(size) < MIN_BPE_VOCAB_SIZE:
        raise ValueError(f"a BPE tokenizer is named bpe:SIZE with SIZE >= {MIN_BPE_VOCAB_SIZE}; got {name!r}")
    return int(size)


def _add_text(text: str, is_last: bool, ids: TokenIds, writer: SplitWriter) -> int:
    """Add a text to its document; the bytes that it has."""
    size = count_text(text, is_last)
    writer.append(ids, *size)
    return size[0]


def _batches(chunks: Iterable[SplitChunk]) -> Iterator[list[SplitChunk]]:
    batch: list[SplitChunk] = []
    size = 0
    for each in chunks:
        batch.append(each)
        size += len(each.chunk.text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(batch: list[SplitChunk], tokenizer: Tokenizer) -> tuple[Iterator[TokenIds], UnknownStats]:
    """The ids of each part of each piece, and what of them is unknown."""
    try:
        ids, unknown = tokenizer.encode_batch_with_stats([text for each in batch for text in each.chunk.segments])
    except ValueError:
        for each in batch:  # slowly again, to say where it was
            try:
                tokenizer.encode_batch(each.chunk.segments)
            except ValueError as error:
                raise ValueError(f"{each.chunk.source}: {error}") from None
        raise
    return iter(ids), unknown


def _round_trip_difference(text: str, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """How the beginning of a text is changed by encoding and decoding it, if nothing in it is unknown."""
    start = text[:_ROUND_TRIP_CHARS]
    (ids,), unknown = tokenizer.encode_batch_with_stats([start])
    if unknown.num_unknown or unknown.num_ambiguous:
        return None
    return first_difference(start, tokenizer.decode(ids.tolist()))
