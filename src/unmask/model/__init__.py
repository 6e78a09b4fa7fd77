"""A backbone read through its objective (`Denoiser`), and that with a tokenizer (`LanguageModel`)."""

from __future__ import annotations

from unmask.model.denoiser import Denoiser, ModelConfig
from unmask.model.language_model import LanguageModel
from unmask.model.samples import Completions, Samples

__all__ = ["Completions", "Denoiser", "LanguageModel", "ModelConfig", "Samples"]
