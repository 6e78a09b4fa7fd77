"""From bytes to batches: sources, tokenizers, corpora, loaders."""
