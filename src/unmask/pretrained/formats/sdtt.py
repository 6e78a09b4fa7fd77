"""The published SDTT format (as in `jdeschena/sdtt`): MDLM's DiT, distilled, and the config of its training.

Its network is MDLM's in all but names, so that such a model is written in MDLM's format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor

_LAYOUT = DiTLayout("SDTT", width="hidden_size", length="length")
_EMBEDDING = "vocab_embed.embedding"


@dataclass(frozen=True)
class _SDTTFormat:
    """Students of MDLM-owt have its module around the network once more, and so their tensors have its prefix twice."""

    model_type: str = "sdtt"

    def can_load(self, config: dict[str, Any]) -> bool:
        return "model_type" not in config and {"parameterization", "model", "time_conditioning"} <= config.keys()

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        settings = config.get("model")
        if not isinstance(settings, dict):
            raise ValueError(f"{where}: config.json needs 'model', the settings of SDTT's network; got {settings!r}")
        prefix = _LAYOUT.prefix
        if all(name.startswith(2 * prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        embedding = weights.get(f"{prefix}{_EMBEDDING}")
        if embedding is None:
            raise ValueError(f"the weights in {where} lack {prefix}{_EMBEDDING}: they are not those of an SDTT")
        timed = ConfigReader(config, where).get_bool("time_conditioning", False)
        objective = MDLM(schedule=LogLinear(eps=1e-3))
        reader = ConfigReader(settings, f"{where} (model)")
        return _LAYOUT.load(reader, embedding.shape[0], weights, objective, time_conditioning=timed)

    def can_export(self, model: LanguageModel) -> bool:
        return False

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        raise ValueError("a distilled MDLM is one: write it with --format mdlm")


SDTT_FORMAT = _SDTTFormat()
