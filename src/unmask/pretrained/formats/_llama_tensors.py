"""Tensors of networks with Llama blocks, published and ours: projections of the same input are one matrix here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.model import LanguageModel
from unmask.pretrained._config_checks import meta_shapes, rename_tensors, require_dit
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab


@dataclass(frozen=True)
class TensorNames:
    """The names of a format's tensors; those of a block follow `block`, formatted with its index."""

    kind: str
    embedding: str
    norm: str
    output: str
    block: str
    norm1: str
    norm2: str
    out: str
    gate: str
    up: str
    down: str
    query: str = ""
    key: str = ""
    value: str = ""
    qkv: str = ""
    """Queries, keys and values in one matrix; empty: each has its own."""
    query_norm: str = ""
    key_norm: str = ""
    router: str = "mlp.gate"
    """The layer that chooses experts."""
    expert_bias: str = "mlp.gate.expert_bias"
    """The whole name of the bias with which they are chosen."""
    expert: str = "mlp.experts.{}"
    """One of the experts."""
    shared_expert: str = "mlp.shared_experts"


TRANSFORMERS_NAMES = TensorNames(
    kind="a Llama",
    embedding="model.embed_tokens",
    norm="model.norm",
    output="lm_head",
    block="model.layers.{}",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
"""As in transformers' Llama, Qwen2 and Qwen3, which most families began as."""


def named(names: TensorNames, kind: str) -> TensorNames:
    """The same names, for a family that is called `kind` in messages."""
    return replace(names, kind=kind)


_BLOCK_PARTS = {
    "norm1": "norm1",
    "norm2": "norm2",
    "out": "attention.out",
    "query_norm": "attention.q_norm",
    "key_norm": "attention.k_norm",
}
"""Modules of a block that are the same in both."""
_QKV = ("query", "key", "value")


def fuse_projections(
    weights: Mapping[str, LazyTensor], names: TensorNames, backbone: DiTConfig, vocab: Vocab, where: str
) -> dict[str, LazyTensor]:
    """Our tensors from published ones."""
    expected = meta_shapes(backbone, vocab, weights, where)
    ours = rename_tensors(weights, _name_table(names, backbone), _unfused_shapes(backbone, expected), where, names.kind)
    for fused, parts in _fused(backbone):
        if parts[0] in ours:
            ours[fused] = LazyTensor.concatenated([ours.pop(part) for part in parts])
    return ours


def split_projections(model: LanguageModel, names: TensorNames) -> dict[str, Tensor]:
    """The published tensors of our network: the inverse of `fuse_projections`."""
    config = require_dit(model.denoiser.config.backbone)
    ours = dict(model.denoiser.backbone.state_dict())
    table = _name_table(names, config)
    separate = set(table.values())
    for fused, parts in _fused(config):
        if parts[0] in separate:
            sizes = _qkv_widths(config) if len(parts) == len(_QKV) else len(ours[fused]) // 2
            ours |= dict(zip(parts, ours.pop(fused).split(sizes), strict=True))
    return {theirs: ours[name].clone() for theirs, name in table.items()}


def _fused(config: DiTConfig) -> Iterator[tuple[str, list[str]]]:
    """Each of our tensors that is made of several, with the intermediate names of its parts in their order."""
    for i in range(config.depth):
        for kind in ("weight", "bias"):
            yield f"layers.{i}.attention.qkv.{kind}", [f"layers.{i}.{part}.{kind}" for part in _QKV]
        for mlp in _mlps(config, i):
            yield f"{mlp}.0.weight", [f"{mlp}.gate.weight", f"{mlp}.up.weight"]


def _mlps(config: DiTConfig, layer: int) -> list[str]:
    """Our names of all MLPs of a block: its own, or its experts."""
    mlp, experts = f"layers.{layer}.mlp", config.experts_of_layer(layer)
    if experts is None:
        return [mlp]
    shared = [] if experts.shared_intermediate_size is None else [f"{mlp}.shared_expert"]
    return [f"{mlp}.experts.{expert}" for expert in range(experts.count)] + shared


def _their_mlps(names: TensorNames, config: DiTConfig, layer: int) -> list[dict[str, str]]:
    """Their names of gate, up and down of the same MLPs."""
    block, experts = names.block.format(layer), config.experts_of_layer(layer)
    parts = {part: getattr(names, part) for part in ("gate", "up", "down")}
    if experts is None:
        return [{part: f"{block}.{name}" for part, name in parts.items()}]
    prefixes = [names.expert.format(expert) for expert in range(experts.count)]
    prefixes += [] if experts.shared_intermediate_size is None else [names.shared_expert]
    return [{part: f"{block}.{prefix}.{name.split('.')[-1]}" for part, name in parts.items()} for prefix in prefixes]


def _qkv_widths(config: DiTConfig) -> list[int]:
    """The output widths of the query, key and value projections."""
    assert config.llama is not None
    shared = config.head_dim * (config.llama.kv_heads or config.heads)
    return [config.head_dim * config.heads, shared, shared]


def _unfused_shapes(config: DiTConfig, fused_shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The expected shapes, with those of the separate projections under their intermediate names."""
    expected = dict(fused_shapes)
    for fused, parts in _fused(config):
        if fused in fused_shapes:
            outputs, *inputs = fused_shapes[fused]
            widths = _qkv_widths(config) if len(parts) == len(_QKV) else [outputs // 2] * 2
            expected |= {part: torch.Size([width, *inputs]) for part, width in zip(parts, widths, strict=True)}
    return expected


def _name_table(names: TensorNames, config: DiTConfig) -> dict[str, str]:
    """Their tensor names to ours, or to an intermediate name for the parts of a fused projection."""
    table = {f"{names.embedding}.weight": "embedding.weight", f"{names.norm}.weight": "norm.weight"}
    if not config.tie_embeddings:
        table[f"{names.output}.weight"] = "lm_head.weight"
    for i in range(config.depth):
        table |= _attention_names(names, config, i) | _mlp_names(names, config, i)
    return table


def _attention_names(names: TensorNames, config: DiTConfig, layer: int) -> dict[str, str]:
    assert config.llama is not None
    theirs, ours = names.block.format(layer), f"layers.{layer}"
    same = [part for part in _BLOCK_PARTS if config.qk_norm or not part.endswith("_norm")]
    table = {f"{theirs}.{getattr(names, part)}.weight": f"{ours}.{_BLOCK_PARTS[part]}.weight" for part in same}
    projections = {names.qkv: "attention.qkv"} if names.qkv else {getattr(names, part): part for part in _QKV}
    for kind in ("weight", "bias") if config.llama.qkv_bias else ("weight",):
        table |= {f"{theirs}.{name}.{kind}": f"{ours}.{part}.{kind}" for name, part in projections.items()}
    return table


def _mlp_names(names: TensorNames, config: DiTConfig, layer: int) -> dict[str, str]:
    table: dict[str, str] = {}
    for theirs, ours in zip(_their_mlps(names, config, layer), _mlps(config, layer), strict=True):
        table |= {f"{theirs[part]}.weight": f"{ours}.{part}.weight" for part in ("gate", "up")}
        table[f"{theirs['down']}.weight"] = f"{ours}.2.weight"
    experts = config.experts_of_layer(layer)
    if experts is not None:
        theirs_block, router = names.block.format(layer), f"layers.{layer}.mlp.router"
        table[f"{theirs_block}.{names.router}.weight"] = f"{router}.gate.weight"
        if experts.selection_bias:
            table[f"{theirs_block}.{names.expert_bias}"] = f"{router}.expert_bias"
    return table
