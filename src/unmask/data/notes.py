"""What people should know of a corpus before they train on it: held out, unknown, cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unmask.data.encoding import TRAIN, VALID

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.data.loader import Layout


def notes(corpus: Corpus, layout: Layout | None = None) -> list[str]:
    """A line each; with the `layout` of a training, also how many pairs it cuts."""
    told = [f"held-out text: {_held_out(corpus)}"] if VALID in corpus.splits else []
    told += [f"note: {note}" for note in corpus.manifest.unknown.notes(corpus.tokenizer.becomes)]
    return told + _pairs(corpus, layout)


def _held_out(corpus: Corpus) -> str:
    valid = corpus.splits[VALID]
    total = sum(split.text.characters for split in corpus.splits.values())
    reached = valid.text.characters / total if total else 0.0
    return (
        f"{valid.documents:,} documents, {valid.tokens:,} tokens, {reached:.2%} of the text"
        f" ({corpus.manifest.options.share:.2%} asked for)"
    )


def _pairs(corpus: Corpus, layout: Layout | None) -> list[str]:
    """How long pairs are or, if it is known how long they may be, how many are cut."""
    split = corpus.splits[TRAIN]
    if split.given is None or not len(split.given):
        return []
    if layout is None:
        lengths = np.diff(split.ends, prepend=0)
        return [
            f"pairs: half have at most {int(np.median(lengths)):,} tokens, the longest has"
            f" {int(lengths.max()):,}; training cuts those that are longer than its rows"
        ]
    from unmask.data.loader import Pairs  # torch takes a second to import, and preparing does not need it
    from unmask.data.pairing import PairRows

    cut = PairRows(split, layout.length).cut() if isinstance(layout, Pairs) else None
    if cut is None or not cut.answers + cut.prompts:
        return []
    return [f"note: rows have {layout.length:,} tokens (layout.length): {cut}"]
