"""The published BD3LM layout (block diffusion): MDLM's tensors, and a config that says how long a block
is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.diffusion.schedule import LogLinear
from unmask.diffusion.times import AnyTimes, PartTimes, UniformTimes
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import BlockDiffusion
from unmask.release import mdlm
from unmask.release.layout import flag, integer, number

MODEL_TYPE = "bd3lm"


def read(
    config: dict[str, Any], weights: dict[str, Tensor], where: str
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights for a published model; the mask is its last id."""
    if not flag(config, "adaln", where, True) or flag(config, "causal", where, False):
        raise ValueError(
            f"{where}: a BD3LM without adaLN, or a causal one, has a layout that is not known here"
        )
    objective = BlockDiffusion(
        block=integer(config, "block_size", where), schedule=LogLinear(eps=0.0), times=_times(config, where)
    )
    return mdlm.converted(config, weights, where, objective)


def write(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A plain DiT that writes blocks, in the published layout: the inverse of `read`, exactly."""
    objective = model.objective
    assert isinstance(objective, BlockDiffusion)
    times = objective.times
    clipped = isinstance(times, PartTimes)
    published, tensors = mdlm.plain_tensors(model)
    return {
        **published,
        "model_type": MODEL_TYPE,
        "block_size": objective.block,
        "cross_attn": True,
        "adaln": True,
        "attn_backend": "sdpa",
        "causal": False,
        "var_min": clipped,
        "sampling_eps_min": times.low if isinstance(times, PartTimes) else 0.0,
        "sampling_eps_max": times.high if isinstance(times, PartTimes) else 1.0,
    }, tensors


def writes(model: LanguageModel) -> bool:
    """Whether this is the layout of such a model."""
    return isinstance(model.objective, BlockDiffusion)


def _times(config: dict[str, Any], where: str) -> AnyTimes:
    """The part of the time that the model was trained on at last."""
    if not flag(config, "var_min", where, False):
        return UniformTimes()
    low, high = (
        number(config, f"sampling_eps_{end}", where, default) for end, default in (("min", 0.0), ("max", 1.0))
    )
    return UniformTimes() if (low, high) == (0, 1) else PartTimes(low, high)
