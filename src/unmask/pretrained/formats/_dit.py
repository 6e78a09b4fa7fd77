"""MDLM's DiT as published: its tensors and settings, which BD3LM, Duo and SEDD share.

Published networks always have adaLN modulation by a time embedding; those without time conditioning get
sigma = 0, so their modulation is a constant. It is folded into the plain weights here, exactly:
LN(x) w (1 + scale) + shift is a LayerNorm with weight w (1 + scale) and bias shift, and a gate scales
the rows of the linear layer before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, TimeConditioning
from unmask.backbones.layers import TimeEmbedding
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import Objective
from unmask.pretrained._config_checks import (
    ConfigReader,
    check_exportable,
    meta_shapes,
    rename_tensors,
    require_dit,
)
from unmask.pretrained.state_dict import LazyTensor
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
_ROW_PER_TOKEN = ("embedding.weight", "lm_head.weight", "lm_head.bias")
_COND = 128
"""The width of the time embedding that networks without time conditioning are written with."""


@dataclass(frozen=True)
class DiTLayout:
    """What a format calls things, and how it deals with the mask and with time."""

    title: str
    """The name in messages."""
    width: str = "hidden_dim"
    """The width's name in the config."""
    length: str = "model_length"
    """The name of the longest text's length in the config."""
    prefix: str = "backbone."
    """What the names of tensors begin with."""
    has_mask: bool = True
    """Whether the last id is the mask. Where nothing is masked, our mask is one id more, which no text has or gets."""

    def load(
        self,
        reader: ConfigReader,
        vocab_size: int,
        weights: dict[str, LazyTensor],
        objective: Objective,
        *,
        time_conditioning: bool,
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        """Our config and tensors; without time conditioning, modulation is folded into plain weights."""
        cond, depth = reader.get_int("cond_dim"), reader.get_depth("n_blocks", weights)
        backbone = DiTConfig(
            width=reader.get_int(self.width),
            depth=depth,
            heads=reader.get_int("n_heads"),
            max_length=reader.get_int(self.length),
            dropout=reader.get_float("dropout", 0.0),
            time_conditioning=TimeConditioning(width=cond, scale=1.0),
        )
        vocab = Vocab(size=vocab_size, mask_id=vocab_size - 1)
        stripped = {name.removeprefix(self.prefix): tensor for name, tensor in weights.items()}
        shapes = meta_shapes(backbone, vocab, weights, reader.where)
        kind = f"an {self.title}" if self.title[0] in "MS" else f"a {self.title}"
        tensors = rename_tensors(stripped, _names(depth), shapes, reader.where, kind, _IGNORED_TENSORS)
        if not self.has_mask:
            vocab = Vocab(size=vocab_size + 1, mask_id=vocab_size)
            tensors |= {name: _with_row(tensors[name]) for name in _ROW_PER_TOKEN}
        if time_conditioning:
            return ModelConfig(vocab, backbone, objective, condition_on_sigma=True), tensors
        plain = replace(backbone, time_conditioning=None)
        return ModelConfig(vocab, plain, objective), _fold_modulation(tensors, depth, cond)

    def export(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The network's part of a published config, and its tensors."""
        config = model.denoiser.config
        backbone, size = require_dit(config.backbone), config.vocab.size
        is_timed = config.condition_on_sigma and backbone.time_conditioning is not None
        cond = backbone.time_conditioning.width if is_timed and backbone.time_conditioning else _COND
        plain = replace(
            backbone,
            time_conditioning=TimeConditioning(width=cond, scale=1.0) if is_timed else None,
            rope_theta=10_000.0,
            local_init=None,
            causal=False,
            qk_norm=False,
            activation="gelu",
            llama=None,
            shift_logits=False,
        )
        check_exportable(backbone, plain, self.title)
        if config.vocab.mask_id != size - 1:
            raise ValueError(f"in the published format the mask is the last id; this model's is {config.vocab.mask_id}")
        weights = dict(model.denoiser.backbone.state_dict())
        if not is_timed:
            weights |= _constant_modulation(weights, backbone)
        if not self.has_mask:
            size -= 1
            weights |= {name: weights[name][:-1] for name in _ROW_PER_TOKEN}
        # safetensors shares no memory between tensors
        tensors = {f"{self.prefix}{theirs}": weights[ours].clone() for theirs, ours in _names(backbone.depth).items()}
        return {
            "vocab_size": size,
            self.length: backbone.max_length,
            self.width: backbone.width,
            "cond_dim": cond,
            "n_blocks": backbone.depth,
            "n_heads": backbone.heads,
            "dropout": backbone.dropout,
            "time_conditioning": is_timed,
        }, tensors


def _names(depth: int) -> dict[str, str]:
    """Our name of each published tensor."""
    blocks = {
        f"blocks.{i}.{theirs}": f"layers.{i}.{ours}" for i in range(depth) for theirs, ours in _BLOCK_NAMES.items()
    }
    return {**_MODEL_NAMES, **blocks}


def _with_row(tensor: LazyTensor) -> LazyTensor:
    """The tensor with one more row, of zeros."""
    row = torch.Size([1, *tensor.shape[1:]])
    zeros = LazyTensor(row, tensor.dtype, lambda: torch.zeros(row, dtype=tensor.dtype))
    return LazyTensor.concatenated([tensor, zeros])


def _constant_modulation(weights: dict[str, Tensor], backbone: DiTConfig) -> dict[str, Tensor]:
    """Modulation of zero weights and constant biases: shift by the norm's bias, scale by one, gate one."""
    width = backbone.width
    zeros, ones = torch.zeros(width), torch.ones(width)
    tensors: dict[str, Tensor] = {}
    for block in (f"layers.{i}" for i in range(backbone.depth)):
        shift1, shift2 = weights[f"{block}.norm1.bias"], weights[f"{block}.norm2.bias"]
        tensors[f"{block}.modulation.weight"] = torch.zeros(6 * width, _COND)
        tensors[f"{block}.modulation.bias"] = torch.cat([shift1, zeros, ones, shift2, zeros, ones])
    tensors["modulation.weight"] = torch.zeros(2 * width, _COND)
    tensors["modulation.bias"] = torch.cat([weights["norm.bias"], zeros])
    for layer, inputs in (("0", 256), ("2", _COND)):
        tensors[f"time_embedding.mlp.{layer}.weight"] = torch.zeros(_COND, inputs)
        tensors[f"time_embedding.mlp.{layer}.bias"] = torch.zeros(_COND)
    return tensors


def _fold_modulation(weights: dict[str, LazyTensor], depth: int, cond: int) -> dict[str, LazyTensor]:
    """The weights of a plain DiT that computes the same as the modulated one at sigma = 0; computed in float64."""
    prefix = "time_embedding."
    of_time = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    plain = {name: each for name, each in weights.items() if not name.startswith(prefix) and "modulation" not in name}

    @cache
    @torch.no_grad()
    def constant() -> Tensor:
        embedding = TimeEmbedding(cond, scale=1.0).double()
        embedding.load_state_dict({name: tensor.view().double() for name, tensor in of_time.items()})
        out: Tensor = embedding(torch.zeros(1, 1, dtype=torch.float64))[0, 0]
        return out

    @cache
    def modulation(name: str, parts: int) -> list[Tensor]:
        weight, bias = (weights[f"{name}.{kind}"].view().double() for kind in ("weight", "bias"))
        return list((weight @ constant() + bias).chunk(parts))

    def scaled(name: str, of: str, parts: int, index: int, offset: int) -> LazyTensor:
        """The tensor times (offset + part), by rows."""

        def compute(tensor: Tensor) -> Tensor:
            factor = offset + modulation(of, parts)[index]
            return (tensor.double() * factor.view(-1, *[1] * (tensor.ndim - 1))).float()

        return replace(LazyTensor.computed(compute, plain[name]), dtype=torch.float32)

    def shift(norm: str, of: str, parts: int, index: int) -> LazyTensor:
        shape = plain[f"{norm}.weight"].shape
        return LazyTensor(shape, torch.float32, lambda: modulation(of, parts)[index].float())

    folded: dict[str, LazyTensor] = {}
    for block in (f"layers.{i}" for i in range(depth)):
        of = f"{block}.modulation"
        for norm, first, gated in (
            ("norm1", 0, ("attention.out.weight",)),
            ("norm2", 3, ("mlp.2.weight", "mlp.2.bias")),
        ):
            folded[f"{block}.{norm}.bias"] = shift(f"{block}.{norm}", of, 6, first)
            folded[f"{block}.{norm}.weight"] = scaled(f"{block}.{norm}.weight", of, 6, first + 1, 1)
            folded |= {f"{block}.{name}": scaled(f"{block}.{name}", of, 6, first + 2, 0) for name in gated}
    folded["norm.weight"], folded["norm.bias"] = (
        scaled("norm.weight", "modulation", 2, 1, 1),
        shift("norm", "modulation", 2, 0),
    )
    return plain | folded
