"""Batches from a corpus: row layouts, shuffling, prompt-completion pairs."""

from unmask.data.loader.loader import Loader, PerDocument, PromptCompletionRows, RowLayout, Wrapped
from unmask.data.loader.prompt_completion import PadIgnored, PadWithEos

__all__ = ["Loader", "PadIgnored", "PadWithEos", "PerDocument", "PromptCompletionRows", "RowLayout", "Wrapped"]
