"""Bounds on -log p of texts and corpora, with standard errors; exact for autoregressive models."""

from __future__ import annotations

from unmask.likelihood._estimate import seeded_generator

__all__ = ["seeded_generator"]
