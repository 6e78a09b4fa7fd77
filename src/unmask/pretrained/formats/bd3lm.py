"""The published BD3LM format (block diffusion): MDLM's tensors, and a config with a block size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.diffusion.schedule import LogLinear
from unmask.diffusion.time_sampling import AnyTimes, ClippedTimes, UniformTimes
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import BlockDiffusion
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor

_LAYOUT = DiTLayout("BD3LM")


@dataclass(frozen=True)
class _BD3LMFormat:
    """A plain DiT that generates block by block."""

    model_type: str = "bd3lm"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        if not reader.get_bool("adaln", True) or reader.get_bool("causal", False):
            raise ValueError(f"{where}: only BD3LM models with adaLN and without causal attention are supported")
        objective = BlockDiffusion(
            block_size=reader.get_int("block_size"), schedule=LogLinear(eps=0.0), times=_parse_times(reader)
        )
        timed = reader.get_bool("time_conditioning", False)
        return _LAYOUT.load(reader, reader.get_int("vocab_size"), weights, objective, time_conditioning=timed)

    def can_export(self, model: LanguageModel) -> bool:
        backbone = model.denoiser.config.backbone
        is_llama = isinstance(backbone, DiTConfig) and backbone.llama is not None
        return isinstance(model.objective, BlockDiffusion) and not is_llama

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        objective = model.objective
        assert isinstance(objective, BlockDiffusion)
        times = objective.times
        low, high = (times.low, times.high) if isinstance(times, ClippedTimes) else (0.0, 1.0)
        config, tensors = _LAYOUT.export(model)
        return {
            **config,
            "model_type": self.model_type,
            "block_size": objective.block_size,
            "cross_attn": True,
            "adaln": True,
            "attn_backend": "sdpa",
            "causal": False,
            "var_min": isinstance(times, ClippedTimes),
            "sampling_eps_min": low,
            "sampling_eps_max": high,
        }, tensors


BD3LM_FORMAT = _BD3LMFormat()


def _parse_times(reader: ConfigReader) -> AnyTimes:
    """The interval of timesteps at the end of training."""
    if not reader.get_bool("var_min", False):
        return UniformTimes()
    low, high = reader.get_float("sampling_eps_min", 0.0), reader.get_float("sampling_eps_max", 1.0)
    return UniformTimes() if (low, high) == (0, 1) else ClippedTimes(low, high)
