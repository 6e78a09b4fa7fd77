"""A model folder and a `LanguageModel`, each from the other; published layouts too; ONNX."""

from __future__ import annotations

from unmask.release.card import Facts, Metadata, Result
from unmask.release.folder import load, model_folder, save
from unmask.release.onnx import export_onnx

__all__ = ["Facts", "Metadata", "Result", "export_onnx", "load", "model_folder", "save"]
