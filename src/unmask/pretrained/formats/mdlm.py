"""The published MDLM layout (as in `kuleshov-group/mdlm-owt`) as a DiT of ours.

Published networks are always modulated by a time embedding; those without time conditioning are fed
sigma = 0, so their modulation is a constant. It is folded into the plain weights here, exactly:
LN(x) w (1 + scale) + shift is a LayerNorm with weight w (1 + scale) and bias shift, and a gate scales
the rows of the linear map it stands behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, TimeConditioning
from unmask.backbones.layers import TimeEmbedding
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, BlockDiffusion
from unmask.pretrained.config_checks import (
    check_exportable,
    get_bool,
    get_depth,
    get_float,
    get_int,
    meta_shapes,
    rename_tensors,
    require_dit,
)
from unmask.types import Vocab

_BLOCK_NAMES = {
    "norm1.weight": "norm1.weight",
    "attn_qkv.weight": "attention.qkv.weight",
    "attn_out.weight": "attention.out.weight",
    "norm2.weight": "norm2.weight",
    "mlp.0.weight": "mlp.0.weight",
    "mlp.0.bias": "mlp.0.bias",
    "mlp.2.weight": "mlp.2.weight",
    "mlp.2.bias": "mlp.2.bias",
    "adaLN_modulation.weight": "modulation.weight",
    "adaLN_modulation.bias": "modulation.bias",
}
_MODEL_NAMES = {
    "vocab_embed.embedding": "embedding.weight",
    "sigma_map.mlp.0.weight": "time_embedding.mlp.0.weight",
    "sigma_map.mlp.0.bias": "time_embedding.mlp.0.bias",
    "sigma_map.mlp.2.weight": "time_embedding.mlp.2.weight",
    "sigma_map.mlp.2.bias": "time_embedding.mlp.2.bias",
    "output_layer.norm_final.weight": "norm.weight",
    "output_layer.adaLN_modulation.weight": "modulation.weight",
    "output_layer.adaLN_modulation.bias": "modulation.bias",
    "output_layer.linear.weight": "lm_head.weight",
    "output_layer.linear.bias": "lm_head.bias",
}
_IGNORED_TENSORS = frozenset({"rotary_emb.inv_freq"})  # a function of the head's width


MODEL_TYPE = "mdlm"


def load_state(config: dict[str, Any], weights: dict[str, Tensor], where: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights for a published model; the mask is its last id."""
    return convert_dit(config, weights, where, MDLM(schedule=LogLinear(eps=1e-3)))


def export_state(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A plain DiT in the published layout: the inverse of `read`, exactly."""
    if not isinstance(model.objective, MDLM):
        raise ValueError("the published layout of plain DiTs holds MDLM and block diffusion models only")
    config, tensors = export_dit(model)
    return {"model_type": MODEL_TYPE, **config, "return_dict": False}, tensors


def can_export(_model: LanguageModel) -> bool:
    """Whether this is the layout of such a model: it is that of any that has no other."""
    return True


def convert_dit(
    config: dict[str, Any], weights: dict[str, Tensor], where: str, objective: MDLM | BlockDiffusion
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A published DiT as ours, with its modulation folded into plain weights if it is not told the time."""
    size, cond = (get_int(config, key, where) for key in ("vocab_size", "cond_dim"))
    depth = get_depth(config, "n_blocks", where, weights)
    timed = get_bool(config, "time_conditioning", where, False)
    backbone = DiTConfig(
        width=get_int(config, "hidden_dim", where),
        depth=depth,
        heads=get_int(config, "n_heads", where),
        max_length=get_int(config, "model_length", where),
        dropout=get_float(config, "dropout", where, 0.0),
        time_conditioning=TimeConditioning(width=cond, scale=1.0),
    )
    vocab = Vocab(size=size, mask_id=size - 1)
    names = dict(_MODEL_NAMES)
    for i in range(depth):
        names |= {f"blocks.{i}.{theirs}": f"blocks.{i}.{ours}" for theirs, ours in _BLOCK_NAMES.items()}
    stripped = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
    ours = rename_tensors(
        stripped, names, meta_shapes(backbone, vocab, weights, where), where, "an MDLM", _IGNORED_TENSORS
    )
    if timed:
        return ModelConfig(vocab, backbone, objective, condition_on_sigma=True), ours
    plain = replace(backbone, time_conditioning=None)
    return ModelConfig(vocab, plain, objective), _fold_modulation(ours, depth, cond)


def _fold_modulation(weights: dict[str, Tensor], depth: int, cond: int) -> dict[str, Tensor]:
    """The weights of a plain DiT that computes what the modulated one does when it is told 0."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    embedding = TimeEmbedding(cond, scale=1.0).double()
    prefix = "time_embedding."
    embedding.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    with torch.no_grad():
        constant = embedding(torch.zeros(1, 1, dtype=torch.float64))[0, 0]
    plain = {k: v for k, v in weights.items() if not k.startswith(prefix) and "modulation" not in k}

    def modulation(name: str, parts: int) -> list[Tensor]:
        return list((weights[f"{name}.weight"] @ constant + weights[f"{name}.bias"]).chunk(parts))

    for block in (f"blocks.{i}" for i in range(depth)):
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(f"{block}.modulation", 6)
        for norm, shift, scale in (("norm1", shift1, scale1), ("norm2", shift2, scale2)):
            plain[f"{block}.{norm}.weight"] = plain[f"{block}.{norm}.weight"] * (1 + scale)
            plain[f"{block}.{norm}.bias"] = shift.clone()
        plain[f"{block}.attention.out.weight"] = plain[f"{block}.attention.out.weight"] * gate1[:, None]
        plain[f"{block}.mlp.2.weight"] = plain[f"{block}.mlp.2.weight"] * gate2[:, None]
        plain[f"{block}.mlp.2.bias"] = plain[f"{block}.mlp.2.bias"] * gate2
    shift, scale = modulation("modulation", 2)
    plain["norm.weight"] = plain["norm.weight"] * (1 + scale)
    plain["norm.bias"] = shift.clone()
    return {name: tensor.float() for name, tensor in plain.items()}


def export_dit(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the config says of the network, and its tensors.

    Their modulation has zero weights, and biases that say: shift by the norm's bias, scale by one, gate one.
    """
    config, weights = model.denoiser.config, model.denoiser.backbone.state_dict()
    backbone = require_dit(config.backbone)
    width = backbone.width
    plain = replace(
        backbone,
        time_conditioning=None,
        rope_theta=10_000.0,
        local_init=None,
        causal=False,
        qk_norm=False,
        activation="gelu",
        llama=None,
        shift_logits=False,
    )
    check_exportable(backbone, plain, "MDLM")
    if config.vocab.mask_id != config.vocab.size - 1:
        raise ValueError("the published layout holds models whose mask is the last id only")
    zeros, ones, cond = torch.zeros(width), torch.ones(width), 128
    tensors: dict[str, Tensor] = {}
    for i in range(backbone.depth):
        ours = f"blocks.{i}"
        shift1, shift2 = weights[f"{ours}.norm1.bias"], weights[f"{ours}.norm2.bias"]
        tensors |= {
            f"{ours}.{theirs}": weights[f"{ours}.{name}"]
            for theirs, name in _BLOCK_NAMES.items()
            if "adaLN" not in theirs
        }
        tensors[f"{ours}.adaLN_modulation.weight"] = torch.zeros(6 * width, cond)
        tensors[f"{ours}.adaLN_modulation.bias"] = torch.cat([shift1, zeros, ones, shift2, zeros, ones])
    for theirs, name in _MODEL_NAMES.items():
        if "adaLN" not in theirs and "sigma_map" not in theirs:
            tensors[theirs] = weights[name]
    tensors["output_layer.adaLN_modulation.weight"] = torch.zeros(2 * width, cond)
    tensors["output_layer.adaLN_modulation.bias"] = torch.cat([weights["norm.bias"], zeros])
    for layer, inputs in (("0", 256), ("2", cond)):
        tensors[f"sigma_map.mlp.{layer}.weight"] = torch.zeros(cond, inputs)
        tensors[f"sigma_map.mlp.{layer}.bias"] = torch.zeros(cond)
    published = {
        "vocab_size": config.vocab.size,
        "model_length": backbone.max_length,
        "hidden_dim": width,
        "cond_dim": cond,
        "n_blocks": backbone.depth,
        "n_heads": backbone.heads,
        "dropout": backbone.dropout,
        "time_conditioning": False,
    }
    return published, {f"backbone.{name}": tensor.clone() for name, tensor in tensors.items()}  # none shared
