"""From bytes to batches. So far: tokenizers."""
