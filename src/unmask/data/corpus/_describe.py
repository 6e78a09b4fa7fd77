"""Lines that describe a corpus before training: held-out text, unknown characters, truncated pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unmask.data.corpus.build import TRAIN_SPLIT, VALID_SPLIT

if TYPE_CHECKING:
    from unmask.data.corpus._token_files import Split
    from unmask.data.corpus.corpus import Corpus
    from unmask.data.loader import RowLayout


def describe_corpus(corpus: Corpus, layout: RowLayout | None) -> list[str]:
    """One line per fact; with the `layout` of a training run, also what it truncates."""
    lines = [f"held-out text: {_validation_summary(corpus)}"] if VALID_SPLIT in corpus.splits else []
    lines += [f"note: {note}" for note in corpus.manifest.unknown.describe(corpus.tokenizer.unk_token)]
    split = corpus.splits[TRAIN_SPLIT]
    return [*lines, *(_pair_lengths(split) if layout is None else layout.describe(split))]


def _validation_summary(corpus: Corpus) -> str:
    valid = corpus.splits[VALID_SPLIT]
    total = sum(split.text_stats.characters for split in corpus.splits.values())
    fraction = valid.text_stats.characters / total if total else 0.0
    config = corpus.manifest.prepare
    asked = ", ".join(config.valid_sources) or f"{config.validation_fraction:.2%} asked for"
    return f"{valid.num_documents:,} documents, {valid.num_tokens:,} tokens, {fraction:.2%} of the text ({asked})"


def _pair_lengths(split: Split) -> list[str]:
    if split.prompt_lengths is None or not len(split.prompt_lengths):
        return []
    lengths = np.diff(split.document_ends, prepend=0)
    return [
        f"pairs: half have at most {int(np.median(lengths)):,} tokens, the longest has"
        f" {int(lengths.max()):,}; training cuts those that are longer than its rows"
    ]
