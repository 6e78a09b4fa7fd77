"""What a published checkpoint format must provide."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from unmask.model import LanguageModel, ModelConfig
from unmask.pretrained.state_dict import LazyTensor


class Format(Protocol):
    """A published format: their `config.json` and tensors to ours, and back, exactly."""

    @property
    def model_type(self) -> str:
        """The `model_type` in the config of such a model."""
        ...

    def can_load(self, config: dict[str, Any]) -> bool:
        """Whether this is the config of a model in this format."""
        ...

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        """Our config and tensors, none of which is read here; `where` names the folder in errors."""
        ...

    def can_export(self, model: LanguageModel) -> bool:
        """Whether models of this kind are published in this format."""
        ...

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and tensors: the inverse of `load_state`; ValueError if the format cannot hold the model."""
        ...
