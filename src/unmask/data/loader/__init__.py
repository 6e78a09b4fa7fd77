"""Batches from a corpus: row layouts, shuffling, prompt-completion pairs."""

from unmask.data.loader.layouts import PerDocument, RowLayout, Rows, Spans, TokenSource, Wrapped
from unmask.data.loader.loader import Loader
from unmask.data.loader.prompt_completion import PadIgnored, PadWithEos, PromptCompletionRows

ROW_LAYOUTS: dict[str, type[RowLayout]] = {
    "wrapped": Wrapped,
    "per-document": PerDocument,
    "prompt-completion": PromptCompletionRows,
}
"""The row layouts by name."""

__all__ = [
    "ROW_LAYOUTS",
    "Loader",
    "PadIgnored",
    "PadWithEos",
    "PerDocument",
    "PromptCompletionRows",
    "RowLayout",
    "Rows",
    "Spans",
    "TokenSource",
    "Wrapped",
]
