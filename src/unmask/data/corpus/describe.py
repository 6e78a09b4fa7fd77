"""What people should know of a corpus before they train on it: held out, unknown, cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unmask.data.corpus.build import TRAIN_SPLIT, VALID_SPLIT

if TYPE_CHECKING:
    from unmask.data.corpus.corpus import Corpus
    from unmask.data.loader import RowLayout


def describe_corpus(corpus: Corpus, layout: RowLayout | None = None) -> list[str]:
    """A line each; with the `layout` of a training, also how many pairs it cuts."""
    told = [f"held-out text: {_validation_summary(corpus)}"] if VALID_SPLIT in corpus.splits else []
    told += [f"note: {note}" for note in corpus.manifest.unknown.describe(corpus.tokenizer.unk_token)]
    return told + _pair_summary(corpus, layout)


def _validation_summary(corpus: Corpus) -> str:
    valid = corpus.splits[VALID_SPLIT]
    total = sum(split.text_stats.characters for split in corpus.splits.values())
    reached = valid.text_stats.characters / total if total else 0.0
    return (
        f"{valid.num_documents:,} documents, {valid.num_tokens:,} tokens, {reached:.2%} of the text"
        f" ({corpus.manifest.prepare.validation_fraction:.2%} asked for)"
    )


def _pair_summary(corpus: Corpus, layout: RowLayout | None) -> list[str]:
    """How long pairs are or, if it is known how long they may be, how many are cut."""
    split = corpus.splits[TRAIN_SPLIT]
    if split.prompt_lengths is None or not len(split.prompt_lengths):
        return []
    if layout is None:
        lengths = np.diff(split.document_ends, prepend=0)
        return [
            f"pairs: half have at most {int(np.median(lengths)):,} tokens, the longest has"
            f" {int(lengths.max()):,}; training cuts those that are longer than its rows"
        ]
    from unmask.data.loader import (
        PromptCompletionRows,
    )  # torch takes a second to import, and preparing does not need it
    from unmask.data.loader.prompt_completion import PairBatcher

    cut = PairBatcher(split, layout.length).truncation_stats() if isinstance(layout, PromptCompletionRows) else None
    if cut is None or not cut.truncated_completions + cut.truncated_prompts:
        return []
    return [f"note: rows have {layout.length:,} tokens (layout.length): {cut}"]
