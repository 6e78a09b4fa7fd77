"""Batches from a corpus: row layouts, shuffling, prompt-completion pairs."""
