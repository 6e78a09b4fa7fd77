"""A model folder and a `LanguageModel`, each from the other; published layouts are read too."""

from __future__ import annotations

from unmask.release.folder import load, save

__all__ = ["load", "save"]
