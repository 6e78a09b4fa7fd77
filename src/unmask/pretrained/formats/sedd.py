"""The published SEDD format (as in `louaaron/sedd-small`): MDLM's DiT, and the config of its training.

On absorbing noise its last layer is log_x + log(V - 1), and its log scores are log_x - log(e^sigma - 1): see `SEDD`. On
uniform noise it gives the log scores themselves, and there is no mask: see `UniformSEDD`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.diffusion.schedule import Geometric, LogLinear, Schedule
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import SEDD, Objective, UniformSEDD
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._dit import DiTLayout
from unmask.pretrained.state_dict import LazyTensor


@dataclass(frozen=True)
class _Graph:
    """One of the noises of SEDD."""

    name: str
    """Its name in the config."""
    objective: type[SEDD | UniformSEDD]
    layout: DiTLayout
    scale_by_sigma: bool
    """Whether the published network divides its scores by e^sigma - 1."""


_GRAPHS = {
    "absorb": _Graph("absorb", SEDD, DiTLayout("SEDD", width="hidden_size", length="length", prefix=""), True),
    "uniform": _Graph(
        "uniform",
        UniformSEDD,
        DiTLayout("SEDD", width="hidden_size", length="length", prefix="", has_mask=False),
        False,
    ),
}


@dataclass(frozen=True)
class _SEDDFormat:
    """Absorbing and uniform noise."""

    model_type: str = "sedd"

    def can_load(self, config: dict[str, Any]) -> bool:
        return "model_type" not in config and {"graph", "noise", "tokens"} <= config.keys()

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        stated, noise, model = (_section(config, name, where) for name in ("graph", "noise", "model"))
        stated.require(type=tuple(_GRAPHS))
        graph = _GRAPHS[stated.config["type"]]
        model.require(scale_by_sigma=graph.scale_by_sigma)
        size = ConfigReader(config, where).get_int("tokens") + int(graph.layout.has_mask)
        objective = graph.objective(schedule=_read_schedule(noise))
        return graph.layout.load(model, size, weights, objective, time_conditioning=True)

    def can_export(self, model: LanguageModel) -> bool:
        return _graph_of(model.objective) is not None and isinstance(model.denoiser.config.backbone, DiTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        objective, graph = model.objective, _graph_of(model.objective)
        assert isinstance(objective, SEDD | UniformSEDD)
        assert graph is not None
        settings, tensors = graph.layout.export(model)
        tokens = settings.pop("vocab_size") - int(graph.layout.has_mask)
        del settings["time_conditioning"]
        network = {"name": "unmask", "type": "ddit", **settings, "scale_by_sigma": graph.scale_by_sigma}
        config = {"tokens": tokens, "graph": {"type": graph.name}, "noise": _write_schedule(objective.schedule)}
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


def _graph_of(objective: Objective) -> _Graph | None:
    return next((graph for graph in _GRAPHS.values() if isinstance(objective, graph.objective)), None)
