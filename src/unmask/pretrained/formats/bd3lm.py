"""The published BD3LM layout (block diffusion): MDLM's tensors, and a config that says how long a block
is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.diffusion.schedule import LogLinear
from unmask.diffusion.time_sampling import AnyTimes, ClippedTimes, UniformTimes
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import BlockDiffusion
from unmask.pretrained.config_checks import get_bool, get_float, get_int
from unmask.pretrained.formats import mdlm

MODEL_TYPE = "bd3lm"


def load_state(config: dict[str, Any], weights: dict[str, Tensor], where: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights for a published model; the mask is its last id."""
    if not get_bool(config, "adaln", where, True) or get_bool(config, "causal", where, False):
        raise ValueError(f"{where}: a BD3LM without adaLN, or a causal one, has a layout that is not known here")
    objective = BlockDiffusion(
        block_size=get_int(config, "block_size", where),
        schedule=LogLinear(eps=0.0),
        times=_parse_times(config, where),
    )
    return mdlm.convert_dit(config, weights, where, objective)


def export_state(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A plain DiT that writes blocks, in the published layout: the inverse of `read`, exactly."""
    objective = model.objective
    assert isinstance(objective, BlockDiffusion)
    times = objective.times
    clipped = isinstance(times, ClippedTimes)
    published, tensors = mdlm.export_dit(model)
    return {
        **published,
        "model_type": MODEL_TYPE,
        "block_size": objective.block_size,
        "cross_attn": True,
        "adaln": True,
        "attn_backend": "sdpa",
        "causal": False,
        "var_min": clipped,
        "sampling_eps_min": times.low if isinstance(times, ClippedTimes) else 0.0,
        "sampling_eps_max": times.high if isinstance(times, ClippedTimes) else 1.0,
    }, tensors


def can_export(model: LanguageModel) -> bool:
    """Whether this is the layout of such a model."""
    return isinstance(model.objective, BlockDiffusion)


def _parse_times(config: dict[str, Any], where: str) -> AnyTimes:
    """The part of the time that the model was trained on at last."""
    if not get_bool(config, "var_min", where, False):
        return UniformTimes()
    low, high = (
        get_float(config, f"sampling_eps_{end}", where, default) for end, default in (("min", 0.0), ("max", 1.0))
    )
    return UniformTimes() if (low, high) == (0, 1) else ClippedTimes(low, high)
