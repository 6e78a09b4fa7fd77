"""How much text the windows of a loader hold."""

from __future__ import annotations

import numpy as np

from unmask.data.corpus import Split, TextStats
from unmask.data.loader import Loader
from unmask.data.tokenizers import BaseTokenizer


def window_text_stats(tokenizer: BaseTokenizer | None, text: Split, loader: Loader, windows: int | None) -> TextStats:
    """Bytes, characters and words of the windows that are scored: of all of them, or of those that are selected."""
    if tokenizer is None or windows is None or windows >= loader.num_sequential_rows:
        return text.text_stats
    stats = TextStats()
    for start, stop in np.stack(loader.sequential_spans(0, windows, num_windows=windows), 1).tolist():
        ids = text.read(start, stop)
        last = text.document_ends[
            np.searchsorted(text.document_ends, start, "right") : np.searchsorted(text.document_ends, stop, "right")
        ]
        last = last - 1 - start  # documents end with a separator, which is not text
        kept = np.delete(ids, last[ids[last] == tokenizer.eos_id])
        stats += TextStats.from_text(tokenizer.decode(kept.tolist()), is_last=False)
    return stats
