"""The published MDLM format (as in `kuleshov-group/mdlm-owt`), loaded as a DiT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor

_LAYOUT = DiTLayout("MDLM")


@dataclass(frozen=True)
class _MDLMFormat:
    """A plain DiT with the log-linear schedule; the mask is the last id."""

    model_type: str = "mdlm"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        timed, objective = reader.get_bool("time_conditioning", False), MDLM(schedule=LogLinear(eps=1e-3))
        return _LAYOUT.load(reader, reader.get_int("vocab_size"), weights, objective, time_conditioning=timed)

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.objective, MDLM) and isinstance(model.denoiser.config.backbone, DiTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = _LAYOUT.export(model)
        return {"model_type": self.model_type, **config, "return_dict": False}, tensors


MDLM_FORMAT = _MDLMFormat()
