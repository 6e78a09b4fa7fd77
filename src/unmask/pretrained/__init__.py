"""A model folder and a `LanguageModel`, each from the other; published layouts too; ONNX."""

from __future__ import annotations

from unmask.pretrained._folder import StoredModel, write_folder
from unmask.pretrained._network import prefers_bf16
from unmask.pretrained._push import check_repo_id, plan_push, push
from unmask.pretrained.load_save import CLASSIFIER_FORMAT, load, resolve_model_folder, save
from unmask.pretrained.model_card import CardMetadata, EvalResult, TrainingFacts
from unmask.pretrained.onnx_export import export_onnx

__all__ = [
    "CLASSIFIER_FORMAT",
    "CardMetadata",
    "EvalResult",
    "StoredModel",
    "TrainingFacts",
    "check_repo_id",
    "export_onnx",
    "load",
    "plan_push",
    "prefers_bf16",
    "push",
    "resolve_model_folder",
    "save",
    "write_folder",
]
