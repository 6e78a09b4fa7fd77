"""The published SEDD format (as in `louaaron/sedd-small`): MDLM's DiT, and the config of its training.

The network's last layer is log_x + log(V - 1), and its log scores are log_x - log(e^sigma - 1): see `SEDD`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.diffusion.schedule import Geometric, LogLinear, Schedule
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import SEDD
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor

_LAYOUT = DiTLayout("SEDD", width="hidden_size", length="length", prefix="")


@dataclass(frozen=True)
class _SEDDFormat:
    """Absorbing noise. Scores of uniform noise, of which no weights are published, are refused."""

    model_type: str = "sedd"

    def can_load(self, config: dict[str, Any]) -> bool:
        return "model_type" not in config and {"graph", "noise", "tokens"} <= config.keys()

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        graph, noise, model = (_section(config, name, where) for name in ("graph", "noise", "model"))
        graph.require(type="absorb")
        model.require(scale_by_sigma=True)
        size = ConfigReader(config, where).get_int("tokens") + 1
        return _LAYOUT.load(model, size, weights, SEDD(schedule=_read_schedule(noise)), time_conditioning=True)

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.objective, SEDD) and isinstance(model.denoiser.config.backbone, DiTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert isinstance(model.objective, SEDD)
        settings, tensors = _LAYOUT.export(model)
        tokens = settings.pop("vocab_size") - 1
        del settings["time_conditioning"]
        network = {"name": "unmask", "type": "ddit", **settings, "scale_by_sigma": True}
        config = {"tokens": tokens, "graph": {"type": "absorb"}, "noise": _write_schedule(model.objective.schedule)}
        return {**config, "model": network}, tensors


SEDD_FORMAT = _SEDDFormat()


def _section(config: dict[str, Any], name: str, where: str) -> ConfigReader:
    values = config.get(name)
    if not isinstance(values, dict):
        raise ValueError(f"{where}: config.json needs {name!r}, the settings of SEDD's {name}; got {values!r}")
    return ConfigReader(values, f"{where} ({name})")


def _read_schedule(noise: ConfigReader) -> Schedule:
    noise.require(type=("loglinear", "geometric"))
    if noise.config.get("type") == "loglinear":
        return LogLinear(eps=1e-3)
    ends = {key: noise.config.get(key) for key in ("sigma_min", "sigma_max")}
    try:
        return Geometric(**{key: float(value) for key, value in ends.items()})  # type: ignore[arg-type]  # or "1e-4"
    except (TypeError, ValueError):
        raise ValueError(
            f"{noise.where}: config.json needs sigma_min < sigma_max, numbers above 0; got {ends}"
        ) from None


def _write_schedule(schedule: Schedule) -> dict[str, Any]:
    if schedule == LogLinear(eps=1e-3):
        return {"type": "loglinear"}
    if isinstance(schedule, Geometric):
        return {"type": "geometric", "sigma_min": schedule.sigma_min, "sigma_max": schedule.sigma_max}
    raise ValueError(f"SEDD's format holds the schedules loglinear (eps = 0.001) and geometric; got {schedule}")
