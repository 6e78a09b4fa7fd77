"""What the published formats of state-space networks share: the sizes in a config, and the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.state_space import SSMConfig, StateSpace
from unmask.pretrained._config_checks import ConfigReader, meta_shapes, rename_tensors
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab

_DIRECTION_TENSORS = (
    "A_log",
    "D",
    "conv1d.weight",
    "conv1d.bias",
    "x_proj.weight",
    "dt_proj.weight",
    "dt_proj.bias",
)


def read_state_space(config: Mapping[str, Any], width: int, where: str) -> StateSpace:
    """The sizes in `ssm_cfg`."""
    given = config.get("ssm_cfg", {})
    if not isinstance(given, dict):
        raise ValueError(f"{where}: config.json's 'ssm_cfg' must be an object; got {given!r}")
    reader = ConfigReader(given, where)
    reader.require(conv_bias=True, bias=False, layer="Mamba1")
    return StateSpace(
        state_size=reader.get_int("d_state", 16),
        kernel_size=reader.get_int("d_conv", 4),
        expand=reader.get_int("expand", 2),
        dt_rank=read_dt_rank(reader, "dt_rank", width),
        dt_min=reader.get_float("dt_min", 0.001),
        dt_max=reader.get_float("dt_max", 0.1),
    )


def read_dt_rank(reader: ConfigReader, key: str, width: int) -> int | None:
    """A rank, or None for the usual one."""
    if reader.config.get(key, "auto") == "auto":
        return None
    rank = reader.get_int(key)
    return None if rank == -(-width // 16) else rank


def write_state_space(config: SSMConfig) -> dict[str, Any]:
    """`ssm_cfg` of a network."""
    sizes = config.state_space
    return {
        "d_state": sizes.state_size,
        "d_conv": sizes.kernel_size,
        "expand": sizes.expand,
        "dt_rank": "auto" if sizes.dt_rank is None else sizes.dt_rank,
        "dt_min": sizes.dt_min,
        "dt_max": sizes.dt_max,
        "dt_init": "random",
        "dt_scale": 1.0,
        "dt_init_floor": 1e-4,
        "conv_bias": True,
        "bias": False,
        "use_fast_path": True,
    }


def padded_vocab(reader: ConfigReader, default_mask: int | None) -> Vocab:
    """The vocabulary, padded to a multiple of `pad_vocab_size_multiple`; the mask is `default_mask` or the last id."""
    multiple = reader.get_int("pad_vocab_size_multiple", 1)
    size = -(-reader.get_int("vocab_size") // multiple) * multiple
    mask = reader.get_token_id("mask_token_id") if "mask_token_id" in reader.config else default_mask
    eos = None if reader.config.get("eos_token_id") is None else reader.get_token_id("eos_token_id")
    return Vocab(size, size - 1 if mask is None else mask, eos)


def mixer_names(theirs: str, ours: str, directions: Mapping[str, str]) -> dict[str, str]:
    """Their names of a mixer's tensors to ours; `directions` maps their name of each direction to ours.

    The projections in and out, which both directions share, are those of their first direction.
    """
    first = next(iter(directions))
    names = {f"{theirs}{first}{part}.weight": f"{ours}{part}.weight" for part in ("in_proj", "out_proj")}
    for direction, ssm in directions.items():
        names |= {f"{theirs}{direction}{part}": f"{ours}{ssm}{part}" for part in _DIRECTION_TENSORS}
    return names


def rename_state(
    weights: Mapping[str, LazyTensor],
    names: Mapping[str, str],
    backbone: SSMConfig,
    vocab: Vocab,
    where: str,
    kind: str,
) -> dict[str, LazyTensor]:
    """Our tensors; `names` maps theirs to ours, and other tensors must be copies of those with the same values."""
    copies = {name: target for name, target in _copies(names).items() if name in weights}
    shapes = meta_shapes(backbone, vocab, weights, where)
    tensors = rename_tensors(weights, names, shapes, where, kind, frozenset(copies))
    for name, target in copies.items():
        message = f"the weights in {where} have {name} apart from {target}, and {kind} shares them"
        if target in weights:
            ours = names[target]
            tensors[ours] = LazyTensor.computed(partial(_require_same, message), tensors[ours], weights[name])
    return tensors


def _copies(names: Mapping[str, str]) -> dict[str, str]:
    """Names under which other programs may store a shared tensor once more, and its first name."""
    copies = {
        name.replace("mamba_fwd", "mamba_rev"): name for name in names if "mamba_fwd" in name and "_proj.weight" in name
    }
    embedding = next(name for name, ours in names.items() if ours == "embedding.weight")
    heads = dict.fromkeys(("lm_head.weight", "lm_head.lm_head.weight", "model.lm_head.weight"), embedding)
    return {name: target for name, target in (copies | heads).items() if name not in names}


def _require_same(message: str, first: Tensor, second: Tensor) -> Tensor:
    """The first tensor, in memory of its own; ValueError if the second is another."""
    if first.shape != second.shape or not torch.equal(first, second):
        raise ValueError(message)
    return first.clone()
