"""The published Duo format (as in `s-sahoo/duo`, `duo-distilled`): MDLM's DiT on uniform noise, always told sigma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import UniformDiffusion
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor

_LAYOUT = DiTLayout("Duo", has_mask=False)


@dataclass(frozen=True)
class _DuoFormat:
    """Tokens are replaced by others, and there is no mask."""

    model_type: str = "duo"

    def can_load(self, config: dict[str, Any]) -> bool:
        return str(config.get("model_type")).lower() == self.model_type  # a copy on the hub has DUO

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        reader.require(causal=False)
        objective = UniformDiffusion(schedule=LogLinear(eps=1e-3), steps=None)
        return _LAYOUT.load(reader, reader.get_int("vocab_size"), weights, objective, time_conditioning=True)

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.objective, UniformDiffusion) and isinstance(model.denoiser.config.backbone, DiTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = _LAYOUT.export(model)
        del config["time_conditioning"]
        return {"model_type": self.model_type, **config, "causal": False, "var_min": True}, tensors


DUO_FORMAT = _DuoFormat()
