"""`unmask prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unmask.cli._arguments import TextArgs, import_tokenizer

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.data.readers import AnyPairFormat


def prepare(
    sources: TextArgs,
    out: Path = Path("corpus"),
    tokenizer: str = "bpe:4096",
    validation_fraction: float = 0.05,
    valid_sources: tuple[str, ...] = (),
    shard: str | None = None,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    prompt: str | None = None,
    completion: str | None = None,
    messages: str | None = None,
    tools: str | None = None,
    chat_template: str | None = None,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    interval_bases: int | None = None,
    allow_unknown: bool = False,
) -> None:
    """Tokenize text into a folder of token ids, which training maps into memory.

    For example:
      unmask prepare my_texts/ --tokenizer bpe:8192 --out corpora/mine
      unmask prepare reads.fastq.gz --tokenizer dna --out corpora/reads
      unmask prepare genome.fa.gz --tokenizer dna --valid-sources genome.fa.gz:chr2:1-2,000 --out corpora/dna
      unmask prepare pairs.jsonl --prompt question --completion reply --out corpora/pairs

    CRLF line endings are read as newlines. A text of which more than 5 % of the characters are unknown to the
    tokenizer (English as DNA) is refused; fewer are counted and reported.

    Args:
        sources: Files or folders (text, .json, .jsonl, .csv, .tsv, .parquet, .arrow, FASTA, FASTQ, each also
            with .gz), regions of a FASTA file (genome.fa:chr1, genome.fa:chr1:1-1,000,000, genome.fa:regions.bed),
            folders of `save_to_disk`, stdlib, or hub:NAME.
        out: The folder to write; a corpus that is up to date is left as it is.
        tokenizer: bytes, text8, dna, protein, bpe:SIZE (trained on the text), a tokenizer.json, hub:NAME, or
            package.module:name for a tokenizer of your own.
        validation_fraction: The share of the text that is held out for validation, within one document.
        valid_sources: Sources to hold out for validation instead; regions of a FASTA file are then not learned.
        shard: I/N prepares every N-th document from the I-th (0 to N - 1); the last shard merges all N.
        lines: Every line of a text file is a document.
        field: The field of JSON objects that holds the text.
        column: The column of tables that holds the text.
        prompt: For prompt-completion pairs: the column or field of the prompt.
        completion: For prompt-completion pairs: the column or field of the completion.
        messages: For chats: the column or field with the list of messages; each answer is a completion.
        tools: For chats: the column or field with the tools that the assistant may call.
        chat_template: For chats: a model's folder, or plain, chatml, headers or roles; plain by default.
        encoding: The encoding of text files, as in latin-1 or utf-16.
        delimiter: The delimiter of csv and tsv files, as in ';' or tab.
        interval_bases: Extend each interval of a BED file from its start to so many bases.
        allow_unknown: Accept text even if much of it is unknown to the tokenizer.
    """
    from unmask.cli._progress import progress
    from unmask.data.corpus import PrepareConfig
    from unmask.data.corpus import prepare as prepare_corpus
    from unmask.data.readers import SourceConfig, Sources

    part = _parse_shard(shard)
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter or "", delimiter)
    pairs = _pair_format(prompt, completion, messages)
    if messages is None and (tools is not None or chat_template is not None):
        raise ValueError("--chat-template and --tools are for --messages: name the column of the conversations")
    if messages is not None:
        pairs = _chat_format(messages, tools, chat_template, tokenizer)
    source = SourceConfig(lines, field, column, pairs, encoding, delimiter, interval_bases)
    options = PrepareConfig(source, validation_fraction, part, allow_unknown, valid_sources=valid_sources)
    size = Sources(sources).text_bytes()
    total = size // part[1] if size is not None and part is not None else size
    with progress("preparing", total, "bytes") as report:
        corpus = prepare_corpus(sources, out, import_tokenizer(tokenizer), options, report)
    _print_corpus(corpus)


def _pair_format(prompt: str | None, completion: str | None, messages: str | None) -> AnyPairFormat | None:
    from unmask.data.readers import ChatRecord, PromptCompletion

    if (prompt is None) != (completion is None) or (messages is not None and prompt is not None):
        raise ValueError("pairs need --prompt and --completion, or --messages alone")
    if prompt is not None and completion is not None:
        return PromptCompletion(prompt, completion)
    return None if messages is None else ChatRecord(messages)


def _chat_format(messages: str, tools: str | None, template: str | None, tokenizer: str) -> AnyPairFormat:
    """Conversations in a template by its name, or in that of a model's folder."""
    from unmask.data.chat import load_chat_template, named_template
    from unmask.data.readers import ChatRecord
    from unmask.data.tokenizers import get_tokenizer

    if template is None:
        return ChatRecord(messages, tools)
    if Path(template).is_dir():
        found = load_chat_template(Path(template))
        if found is None:
            raise ValueError(f"{template} has no chat template")
        return ChatRecord(messages, tools, found)
    known = None if tokenizer.startswith("bpe:") else get_tokenizer(tokenizer)
    return ChatRecord(messages, tools, named_template(template, known))


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"a shard is written I/N, 0/4 to 3/4 for four; got {text!r}")
    return int(parts[0]), int(parts[1])


def _print_corpus(corpus: Corpus) -> None:
    for name, split in corpus.splits.items():
        print(
            f"{name}: {split.num_tokens:,} tokens in {split.num_documents:,} documents,"
            f" {split.text_stats.bytes:,} bytes"
        )
    for note in corpus.describe():
        print(note)
    print(f"vocabulary: {corpus.vocab.size:,} with the mask; in {corpus.folder}")
