"""Build a corpus folder: train a tokenizer if needed, encode all documents, write token files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unmask.data.chat import without_guards
from unmask.data.corpus._manifest import (
    MANIFEST_FILE,
    Manifest,
    PrepareConfig,
    SourceRecord,
    TokenizerRecord,
)
from unmask.data.corpus._splits import SplitChunk, assign_splits, named_splits
from unmask.data.corpus._token_files import SplitWriter
from unmask.data.corpus.text_stats import TextStats
from unmask.data.readers._text import CHUNK_CHARS, TextChunk
from unmask.data.readers.sources import Sources
from unmask.data.tokenizers import MIN_BPE_VOCAB_SIZE, BaseTokenizer, TokenIds, Tokenizer, UnknownStats, get_tokenizer
from unmask.registry import AllowCode, class_id

if TYPE_CHECKING:
    from unmask.types import ProgressFn

TOKENIZER_FILE = "tokenizer.json"
TRAIN_SPLIT, VALID_SPLIT = "train", "valid"

_BATCH_CHARS = 16 * CHUNK_CHARS
"""Characters per encoded batch: enough work for all cores, and little memory."""

_MAX_BPE_CHARS, _BPE_CHARS_PER_TOKEN = 64 << 20, 1 << 10
"""Characters that a BPE vocabulary is trained on: the maximum, and per token of the vocabulary."""

_ROUND_TRIP_CHARS = 4096
"""Characters that are encoded and decoded, to check that the tokenizer keeps a text as it is."""


@dataclass(frozen=True)
class CorpusBuild:
    """What is to be prepared. `tokenizer` is None if a BPE of `bpe_vocab_size` tokens is to be trained."""

    sources: Sources
    valid_sources: Sources
    source_records: tuple[SourceRecord, ...]
    tokenizer_name: str
    tokenizer: BaseTokenizer | None
    bpe_vocab_size: int
    config: PrepareConfig

    @classmethod
    def create(
        cls, sources: Sequence[str] | Sources, tokenizer: str | BaseTokenizer, config: PrepareConfig
    ) -> CorpusBuild:
        """Check the request, and hash the sources unless `sources` has done so before."""
        sources = sources if isinstance(sources, Sources) else Sources(sources)
        if not sources.names:
            raise ValueError("a corpus needs at least one source, for instance stdlib")
        name = tokenizer if isinstance(tokenizer, str) else class_id(type(tokenizer))
        bpe_vocab_size = 0
        if isinstance(tokenizer, str):
            bpe_vocab_size = _parse_bpe_size(tokenizer)
            known = None if bpe_vocab_size else get_tokenizer(tokenizer)
        else:
            known = tokenizer
        if config.source.pair_format is not None and known is not None and known.eos_id is None:
            raise ValueError(f"the tokenizer {name} has no end-of-text token, which prompt-completion pairs need")
        valid = Sources(config.valid_sources)
        fingerprints = [*sources.fingerprints.items(), *valid.fingerprints.items()]
        records = tuple(SourceRecord(*each) for each in fingerprints)
        return cls(sources, valid, records, name, known, bpe_vocab_size, config)

    @property
    def allow_code(self) -> AllowCode:
        """The class of the tokenizer: it is imported already, so a corpus folder may name it."""
        return () if self.tokenizer is None else (class_id(type(self.tokenizer)),)

    def matches(self, manifest: Manifest) -> bool:
        """Whether preparing would give that corpus again: same text, same config, same tokenizer.

        Tokenizers are the same if their JSON is. One that is yet to be trained is the same if its name is, since
        training is a function of text and config.
        """
        fingerprints = [source.fingerprint for source in self.source_records]
        return (
            [source.fingerprint for source in manifest.sources] == fingerprints
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
            valid = SplitWriter(folder, VALID_SPLIT, tokenizer, files, pairs) if self.config.holds_out else train
            unknown = self._encode(tokenizer, (train, valid), progress)
            splits = [writer.close() for writer in dict.fromkeys((train, valid))]
        for sources in (self.sources, self.valid_sources):
            if sources.file_stats() != sources.stats_before:
                raise ValueError(f"{', '.join(sources.names)} changed while it was read; prepare it again")
        record = TokenizerRecord(self.tokenizer_name, tokenizer.digest, tokenizer.vocab_size, tokenizer.eos_id)
        dtype = tokenizer.dtype.name
        manifest = Manifest(self.source_records, record, self.config, dtype, tuple(splits), unknown=unknown)
        manifest.write(folder / MANIFEST_FILE)

    def _encode(
        self, tokenizer: BaseTokenizer, writers: tuple[SplitWriter, SplitWriter], progress: ProgressFn | None
    ) -> UnknownStats:
        """Write the ids of all documents; return what is unknown, and raise if it is too much."""
        eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], tokenizer.dtype)
        first_token = self.config.first_token
        first = np.array(tokenizer.find_ids([] if first_token is None else [first_token]), tokenizer.dtype)
        previous: SplitChunk | None = None
        unknown, num_bytes = UnknownStats(), 0
        for batch in _batches(self._split_chunks(this_shard=True)):
            ids, batch_unknown = _encode_batch(batch, tokenizer)
            if previous is None:
                difference = _round_trip_difference(batch[0].chunk.text, tokenizer)
                batch_unknown = replace(batch_unknown, round_trip_difference=difference)
            unknown += batch_unknown
            self._check_unknown(unknown, tokenizer)
            for split_chunk in batch:
                writer = writers[split_chunk.held_out]
                if not split_chunk.continues(previous):
                    writer.end_document()
                    if len(first):
                        writer.append(first)
                num_bytes += _write_chunk(split_chunk.chunk, ids, writer, eos)
                previous = split_chunk
            for writer in writers:
                writer.flush()
            if progress is not None:
                progress(num_bytes)
        return unknown

    def _check_unknown(self, unknown: UnknownStats, tokenizer: BaseTokenizer) -> None:
        if unknown.exceeds_limit and not self.config.allow_unknown:
            raise ValueError(
                f"{', '.join(self.sources.names)}: {tokenizer.unknown_text_message(unknown)}, or prepare it all the"
                " same with --allow-unknown (a setting: prepare.allow_unknown=true)"
            )

    def _split_chunks(self, this_shard: bool) -> Iterator[SplitChunk]:
        """The chunks of the whole corpus or, if `this_shard`, of the documents of this shard."""
        source = self.config.source
        if self.valid_sources.names:
            train = self.sources.read_documents(source, held_out=self.valid_sources)
            chunks = named_splits(train, self.valid_sources.read_documents(source))
        else:
            chunks = assign_splits(self.sources.read_documents(source), self.config.validation_fraction)
        if self.config.shard is None or not this_shard:
            return chunks
        i, n = self.config.shard
        return (chunk for chunk in chunks if chunk.document_index % n == i)

    def _bpe_texts(self) -> Iterator[str]:
        """Texts to train a tokenizer on: the same for all shards, and none that is held out."""
        max_chars = min(_MAX_BPE_CHARS, _BPE_CHARS_PER_TOKEN * self.bpe_vocab_size)
        chunks = self._split_chunks(this_shard=False)
        texts = (without_guards(text) for chunk, held_out, _ in chunks if not held_out for text in chunk.segments)
        return iter(_subsample(texts, max_chars))


def _subsample(texts: Iterable[str], max_chars: int) -> list[str]:
    """At most `max_chars` characters, spread evenly over any number of texts, in one pass."""
    sample: list[tuple[int, str]] = []
    size, limit = 0, 1 << 64
    for number, text in enumerate(texts):
        rank = number * 0xD1B54A32D192ED03 % (1 << 64)  # multiples of an irrational number: ranks spread evenly
        if rank >= limit:
            continue
        sample.append((rank, text))
        size += len(text)
        while size > max_chars and len(sample) > 1:
            limit //= 2
            sample = [(rank, text) for rank, text in sample if rank < limit]
            size = sum(len(text) for _, text in sample)
    return [text for _, text in sample]


def _parse_bpe_size(name: str) -> int:
    """The N of bpe:N; 0 for other tokenizers."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return 0
    if not size.isdecimal() or int(size) < MIN_BPE_VOCAB_SIZE:
        raise ValueError(f"a BPE tokenizer is named bpe:SIZE with SIZE >= {MIN_BPE_VOCAB_SIZE}; got {name!r}")
    return int(size)


def _write_chunk(chunk: TextChunk, ids: Iterator[TokenIds], writer: SplitWriter, eos: TokenIds) -> int:
    """Write the ids of a chunk's segments; return the bytes of its text."""
    num_bytes = 0
    *prompts, text = chunk.segments
    for prompt in prompts:
        num_bytes += _write_text(prompt, False, next(ids), writer)
        writer.end_prompt()
    num_bytes += _write_text(text, chunk.is_last, next(ids), writer)
    if chunk.is_last:
        writer.append(eos)
        writer.end_document()
    return num_bytes


def _write_text(text: str, is_last: bool, ids: TokenIds, writer: SplitWriter) -> int:
    """Add a text to its document; return its bytes."""
    stats = TextStats.from_text(without_guards(text), is_last)
    writer.append(ids, stats)
    return stats.bytes


def _batches(chunks: Iterable[SplitChunk]) -> Iterator[list[SplitChunk]]:
    batch: list[SplitChunk] = []
    size = 0
    for split_chunk in chunks:
        batch.append(split_chunk)
        size += len(split_chunk.chunk.text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_batch(batch: list[SplitChunk], tokenizer: BaseTokenizer) -> tuple[Iterator[TokenIds], UnknownStats]:
    """The ids of each segment of each chunk, and how much of the text is unknown."""
    chunks = [split_chunk.chunk for split_chunk in batch]
    if any(chunk.template is not None for chunk in chunks):
        return _encode_chats(chunks, tokenizer)
    try:
        ids, unknown = tokenizer.encode_batch_with_stats([text for chunk in chunks for text in chunk.segments])
    except ValueError:
        for chunk in chunks:  # encode one by one, to find the document
            try:
                tokenizer.encode_batch(chunk.segments)
            except ValueError as error:
                raise ValueError(f"{chunk.source}: {error}") from None
        raise
    return iter(ids), unknown


def _encode_chats(chunks: list[TextChunk], tokenizer: BaseTokenizer) -> tuple[Iterator[TokenIds], UnknownStats]:
    """The same for conversations, whose templates know which special tokens are theirs."""
    ids: list[TokenIds] = []
    for chunk in chunks:
        assert chunk.template is not None  # all documents of a corpus are in one format
        try:
            ids += [
                np.array(chunk.template.encode_guarded(tokenizer, text), tokenizer.dtype) for text in chunk.segments
            ]
        except ValueError as error:
            raise ValueError(f"{chunk.source}: {error}") from None
    return iter(ids), UnknownStats(sum(len(chunk.text) for chunk in chunks))


def _round_trip_difference(text: str, tokenizer: BaseTokenizer) -> tuple[str, str] | None:
    """Where encoding and decoding first change the beginning of a text, white space aside: before and after.

    None if nothing changes, or if characters are unknown, which are counted elsewhere.
    """
    start = text[:_ROUND_TRIP_CHARS]
    (ids,), unknown = tokenizer.encode_batch_with_stats([start])
    before, after = "".join(start.split()), "".join(tokenizer.decode(ids.tolist()).split())
    if unknown.num_unknown or unknown.num_ambiguous or before == after:
        return None
    length = min(len(before), len(after))
    position = next((i for i in range(length) if before[i] != after[i]), length)
    first = max(0, position - 4)
    return before[first : first + 16], after[first : first + 16]
