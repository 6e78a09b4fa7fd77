"""The published MDLM format (as in `kuleshov-group/mdlm-owt`), loaded as a DiT.

Published networks always have adaLN modulation by a time embedding; those without time conditioning get
sigma = 0, so their modulation is a constant. It is folded into the plain weights here, exactly:
LN(x) w (1 + scale) + shift is a LayerNorm with weight w (1 + scale) and bias shift, and a gate scales
the rows of the linear layer before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, TimeConditioning
from unmask.backbones.layers import TimeEmbedding
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, BlockDiffusion
from unmask.pretrained._config_checks import (
    ConfigReader,
    check_exportable,
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
_IGNORED_TENSORS = frozenset({"rotary_emb.inv_freq"})  # computed from the head size


@dataclass(frozen=True)
class _MDLMFormat:
    """A plain DiT with the log-linear schedule; the mask is the last id."""

    model_type: str = "mdlm"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, Tensor], where: str
    ) -> tuple[ModelConfig, dict[str, Tensor]]:
        return convert_dit(config, weights, where, MDLM(schedule=LogLinear(eps=1e-3)))

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.objective, MDLM) and isinstance(model.denoiser.config.backbone, DiTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config, tensors = export_dit(model)
        return {"model_type": self.model_type, **config, "return_dict": False}, tensors


MDLM_FORMAT = _MDLMFormat()


def convert_dit(
    config: dict[str, Any], weights: dict[str, Tensor], where: str, objective: MDLM | BlockDiffusion
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A published DiT as ours; without time conditioning, its modulation is folded into plain weights."""
    reader = ConfigReader(config, where)
    size, cond = reader.get_int("vocab_size"), reader.get_int("cond_dim")
    depth = reader.get_depth("n_blocks", weights)
    backbone = DiTConfig(
        width=reader.get_int("hidden_dim"),
        depth=depth,
        heads=reader.get_int("n_heads"),
        max_length=reader.get_int("model_length"),
        dropout=reader.get_float("dropout", 0.0),
        time_conditioning=TimeConditioning(width=cond, scale=1.0),
    )
    vocab = Vocab(size=size, mask_id=size - 1)
    names = dict(_MODEL_NAMES)
    for i in range(depth):
        names |= {f"blocks.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in _BLOCK_NAMES.items()}
    stripped = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
    shapes = meta_shapes(backbone, vocab, weights, where)
    tensors = rename_tensors(stripped, names, shapes, where, "an MDLM", _IGNORED_TENSORS)
    if reader.get_bool("time_conditioning", False):
        return ModelConfig(vocab, backbone, objective, condition_on_sigma=True), tensors
    plain = replace(backbone, time_conditioning=None)
    return ModelConfig(vocab, plain, objective), _fold_modulation(tensors, depth, cond)


def _fold_modulation(weights: dict[str, Tensor], depth: int, cond: int) -> dict[str, Tensor]:
    """The weights of a plain DiT that computes the same as the modulated one at sigma = 0."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    embedding = TimeEmbedding(cond, scale=1.0).double()
    prefix = "time_embedding."
    embedding.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    with torch.no_grad():
        constant = embedding(torch.zeros(1, 1, dtype=torch.float64))[0, 0]
    plain = {k: v for k, v in weights.items() if not k.startswith(prefix) and "modulation" not in k}

    def modulation(name: str, parts: int) -> list[Tensor]:
        return list((weights[f"{name}.weight"] @ constant + weights[f"{name}.bias"]).chunk(parts))

    for block in (f"layers.{i}" for i in range(depth)):
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
    """The network's part of a published config, and its tensors.

    The modulation gets zero weights and constant biases: shift by the norm's bias, scale by one, gate one.
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
        raise ValueError(f"in the published format the mask is the last id; this model's is {config.vocab.mask_id}")
    zeros, ones, cond = torch.zeros(width), torch.ones(width), 128
    tensors: dict[str, Tensor] = {}
    for i in range(backbone.depth):
        ours, published = f"layers.{i}", f"blocks.{i}"
        shift1, shift2 = weights[f"{ours}.norm1.bias"], weights[f"{ours}.norm2.bias"]
        tensors |= {
            f"{published}.{theirs}": weights[f"{ours}.{name}"]
            for theirs, name in _BLOCK_NAMES.items()
            if "adaLN" not in theirs
        }
        tensors[f"{published}.adaLN_modulation.weight"] = torch.zeros(6 * width, cond)
        tensors[f"{published}.adaLN_modulation.bias"] = torch.cat([shift1, zeros, ones, shift2, zeros, ones])
    for theirs, name in _MODEL_NAMES.items():
        if "adaLN" not in theirs and "sigma_map" not in theirs:
            tensors[theirs] = weights[name]
    tensors["output_layer.adaLN_modulation.weight"] = torch.zeros(2 * width, cond)
    tensors["output_layer.adaLN_modulation.bias"] = torch.cat([weights["norm.bias"], zeros])
    for layer, inputs in (("0", 256), ("2", cond)):
        tensors[f"sigma_map.mlp.{layer}.weight"] = torch.zeros(cond, inputs)
        tensors[f"sigma_map.mlp.{layer}.bias"] = torch.zeros(cond)
    exported = {
        "vocab_size": config.vocab.size,
        "model_length": backbone.max_length,
        "hidden_dim": width,
        "cond_dim": cond,
        "n_blocks": backbone.depth,
        "n_heads": backbone.heads,
        "dropout": backbone.dropout,
        "time_conditioning": False,
    }
    return exported, {f"backbone.{name}": tensor.clone() for name, tensor in tensors.items()}  # safetensors shares none
