"""Formats of networks with Llama blocks: projections of the same input are fused into one matrix here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, LlamaBlock
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import (
    ConfigReader,
    check_exportable,
    meta_shapes,
    rename_tensors,
    require_dit,
)
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
    query: str
    key: str
    value: str
    out: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of a format's config for the sizes of a network."""

    width: str
    depth: str
    heads: str
    kv_heads: str
    intermediate_size: str
    max_length: str
    tie_embeddings: str
    rope_theta: str = "rope_theta"
    norm_eps: str = "rms_norm_eps"
    vocab: str = "vocab_size"


@dataclass(frozen=True)
class LlamaFormat:
    """A published format of bidirectional Llama networks."""

    model_type: str
    tensor_names: TensorNames
    config_keys: ConfigKeys
    required: Mapping[str, object]
    """The only supported values of other options."""
    constants: Mapping[str, object]
    """Entries that every exported config has."""
    default_norm_eps: float
    qkv_bias: bool = False
    shift_logits: bool = False

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, Tensor], where: str
    ) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Our config and tensors; the schedule is linear."""
        reader, keys = ConfigReader(config, where), self.config_keys
        reader.require(**self.required)
        heads = reader.get_int(keys.heads)
        kv_heads = reader.get_int(keys.kv_heads, heads)
        backbone = DiTConfig(
            width=reader.get_int(keys.width),
            depth=reader.get_depth(keys.depth, weights),
            heads=heads,
            max_length=reader.get_int(keys.max_length),
            dropout=0.0,
            tie_embeddings=reader.get_bool(keys.tie_embeddings, False),
            rope_theta=reader.get_float(keys.rope_theta, 10_000.0),
            llama=LlamaBlock(
                intermediate_size=reader.get_int(keys.intermediate_size),
                kv_heads=None if kv_heads == heads else kv_heads,
                norm_eps=reader.get_float(keys.norm_eps, self.default_norm_eps),
                qkv_bias=self.qkv_bias,
            ),
            shift_logits=self.shift_logits,
        )
        eos_id = None if config.get("eos_token_id") is None else reader.get_token_id("eos_token_id")
        size = reader.get_int(keys.vocab, config.get("vocab_size"))
        vocab = Vocab(size, reader.get_token_id("mask_token_id"), eos_id)
        tensors = _fuse_projections(weights, self.tensor_names, backbone, vocab, where)
        return ModelConfig(vocab, backbone, _OBJECTIVE), tensors

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and tensors: the inverse of `load_state`."""
        llama, keys = _require_llama(model, self), self.config_keys
        config = model.denoiser.config
        backbone, vocab = require_dit(config.backbone), config.vocab
        assert isinstance(config.objective, MDLM)
        if config.objective.schedule != _OBJECTIVE.schedule:
            raise ValueError(
                f"{self.tensor_names.kind} has the linear schedule only: train with --set objective.schedule.eps=0"
            )
        return {
            "model_type": self.model_type,
            **self.constants,
            keys.width: backbone.width,
            keys.heads: backbone.heads,
            keys.kv_heads: llama.kv_heads or backbone.heads,
            keys.depth: backbone.depth,
            keys.intermediate_size: llama.intermediate_size,
            keys.rope_theta: backbone.rope_theta,
            keys.max_length: backbone.max_length,
            keys.vocab: vocab.size,
            "vocab_size": vocab.size,
            "mask_token_id": vocab.mask_id,
            "eos_token_id": vocab.eos_id,
            "pad_token_id": vocab.eos_id,
            keys.norm_eps: llama.norm_eps,
            keys.tie_embeddings: backbone.tie_embeddings,
        }, _split_projections(model, self.tensor_names)

    def can_export(self, model: LanguageModel) -> bool:
        """Whether the model has Llama blocks, and shifted logits if this format has them."""
        backbone = model.denoiser.config.backbone
        return (
            isinstance(backbone, DiTConfig)
            and backbone.llama is not None
            and backbone.shift_logits == self.shift_logits
            and isinstance(model.objective, MDLM)
        )


_OBJECTIVE = MDLM(schedule=LogLinear(eps=0.0))

_BLOCK_PARTS = {"norm1": "norm1", "norm2": "norm2", "out": "attention.out", "down": "mlp.2"}
"""Modules of a block that are the same in both."""


def _fuse_projections(
    weights: Mapping[str, Tensor], names: TensorNames, backbone: DiTConfig, vocab: Vocab, where: str
) -> dict[str, Tensor]:
    """Our tensors from published ones."""
    expected = meta_shapes(backbone, vocab, weights, where)
    ours = rename_tensors(weights, _name_table(names, backbone), _unfused_shapes(backbone, expected), where, names.kind)
    for i in range(backbone.depth):
        block = f"layers.{i}"
        for kind in ("weight", "bias"):
            if f"{block}.query.{kind}" in ours:
                parts = [ours.pop(f"{block}.{part}.{kind}") for part in ("query", "key", "value")]
                ours[f"{block}.attention.qkv.{kind}"] = torch.cat(parts)
        halves = [ours.pop(f"{block}.{part}.weight") for part in ("gate", "up")]
        ours[f"{block}.mlp.0.weight"] = torch.cat(halves)
    return ours


def _split_projections(model: LanguageModel, names: TensorNames) -> dict[str, Tensor]:
    """The published tensors of our network: the inverse of `_fuse_projections`."""
    config = require_dit(model.denoiser.config.backbone)
    ours = dict(model.denoiser.backbone.state_dict())
    for i in range(config.depth):
        block = f"layers.{i}"
        for kind in ("weight", "bias"):
            if f"{block}.attention.qkv.{kind}" in ours:
                parts = ours.pop(f"{block}.attention.qkv.{kind}").split(_qkv_widths(config))
                ours |= {
                    f"{block}.{part}.{kind}": tensor
                    for part, tensor in zip(("query", "key", "value"), parts, strict=True)
                }
        halves = ours.pop(f"{block}.mlp.0.weight").chunk(2)
        ours |= {f"{block}.{part}.weight": half for part, half in zip(("gate", "up"), halves, strict=True)}
    return {theirs: ours[name].clone() for theirs, name in _name_table(names, config).items()}


def _require_llama(model: LanguageModel, format_: LlamaFormat) -> LlamaBlock:
    """The block config of a model that the format can hold; others are refused."""
    backbone = require_dit(model.denoiser.config.backbone)
    llama = backbone.llama
    plain = replace(
        backbone,
        time_conditioning=None,
        local_init=None,
        causal=False,
        qk_norm=False,
        shift_logits=format_.shift_logits,
        dropout=0.0,
    )
    check_exportable(backbone, plain, format_.tensor_names.kind.removeprefix("a "))
    assert llama is not None  # see can_export
    if llama.qkv_bias != format_.qkv_bias:
        raise ValueError(
            f"{format_.tensor_names.kind}'s queries, keys and values have {'' if format_.qkv_bias else 'no '}biases:"
            f" train with backbone.llama.qkv_bias={str(format_.qkv_bias).lower()}"
        )
    return llama


def _qkv_widths(config: DiTConfig) -> list[int]:
    """The output widths of the query, key and value projections."""
    assert config.llama is not None
    shared = config.width // config.heads * (config.llama.kv_heads or config.heads)
    return [config.width, shared, shared]


def _unfused_shapes(config: DiTConfig, fused_shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The expected shapes, with those of the separate projections under their intermediate names."""
    assert config.llama is not None
    expected = dict(fused_shapes)
    for i in range(config.depth):
        for part, width in zip(("query", "key", "value"), _qkv_widths(config), strict=True):
            expected[f"layers.{i}.{part}.weight"] = torch.Size([width, config.width])
            expected[f"layers.{i}.{part}.bias"] = torch.Size([width])
        for part in ("gate", "up"):
            expected[f"layers.{i}.{part}.weight"] = torch.Size([config.llama.intermediate_size, config.width])
    return expected


def _name_table(names: TensorNames, config: DiTConfig) -> dict[str, str]:
    """Their tensor names to ours, or to an intermediate name for the parts of a fused projection."""
    assert config.llama is not None
    table = {f"{names.embedding}.weight": "embedding.weight", f"{names.norm}.weight": "norm.weight"}
    if not config.tie_embeddings:
        table[f"{names.output}.weight"] = "lm_head.weight"
    for i in range(config.depth):
        theirs = names.block.format(i)
        for part in ("norm1", "norm2", "query", "key", "value", "out", "gate", "up", "down"):
            ours = f"layers.{i}.{_BLOCK_PARTS.get(part, part)}"
            table[f"{theirs}.{getattr(names, part)}.weight"] = f"{ours}.weight"
            if config.llama.qkv_bias and part in ("query", "key", "value"):
                table[f"{theirs}.{getattr(names, part)}.bias"] = f"{ours}.bias"
    return table
