"""Bounds on -log p of texts and corpora, with standard errors; exact for autoregressive models."""
