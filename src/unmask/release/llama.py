"""Networks of Llama blocks as DiTs of ours: projections that read the same input are one matrix here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, Llama
from unmask.model import LanguageModel
from unmask.release.layout import own, renamed, shapes
from unmask.types import Vocab


@dataclass(frozen=True)
class Names:
    """What a layout calls the tensors; those of a block come after `block`, filled in with its number."""

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


PARTS = {"norm1": "norm1", "norm2": "norm2", "out": "attention.out", "down": "mlp.2"}
"""Parts of a block that are one tensor in both layouts."""


def fused(
    weights: Mapping[str, Tensor], names: Names, backbone: DiTConfig, vocab: Vocab, where: str
) -> dict[str, Tensor]:
    """The tensors of our network from published ones."""
    expected = shapes(backbone, vocab)
    ours = renamed(weights, _table(names, backbone), _split_shapes(backbone, expected), where, names.kind)
    for i in range(backbone.depth):
        block = f"blocks.{i}"
        for kind in ("weight", "bias"):
            if f"{block}.query.{kind}" in ours:
                parts = [ours.pop(f"{block}.{part}.{kind}") for part in ("query", "key", "value")]
                ours[f"{block}.attention.qkv.{kind}"] = torch.cat(parts)
        halves = [ours.pop(f"{block}.{part}.weight") for part in ("gate", "up")]
        ours[f"{block}.mlp.0.weight"] = torch.cat(halves)
    return ours


def split(model: LanguageModel, names: Names) -> dict[str, Tensor]:
    """The published tensors of our network: the inverse of `fused`, exactly."""
    config = own(model.denoise.config.backbone)
    ours = dict(model.denoise.backbone.state_dict())
    for i in range(config.depth):
        block = f"blocks.{i}"
        for kind in ("weight", "bias"):
            if f"{block}.attention.qkv.{kind}" in ours:
                parts = ours.pop(f"{block}.attention.qkv.{kind}").split(_widths(config))
                ours |= {
                    f"{block}.{part}.{kind}": tensor
                    for part, tensor in zip(("query", "key", "value"), parts, strict=True)
                }
        halves = ours.pop(f"{block}.mlp.0.weight").chunk(2)
        ours |= {f"{block}.{part}.weight": half for part, half in zip(("gate", "up"), halves, strict=True)}
    return {theirs: ours[name].clone() for theirs, name in _table(names, config).items()}


def check_plain(model: LanguageModel, layout: str, *, bias: bool, shifted: bool) -> Llama:
    """The blocks of a model that a layout of Llama networks can hold; what it cannot is refused."""
    backbone = own(model.denoise.config.backbone)
    llama = backbone.llama
    plain = replace(
        backbone, time=None, local=None, causal=False, qk_norm=False, shifted=shifted, dropout=0.0
    )
    if llama is None or backbone != plain or llama.bias != bias:
        raise ValueError(
            f"{layout}'s layout holds bidirectional networks of Llama blocks only: no time, QK-norm, local"
            " start or dropout"
        )
    return llama


def _widths(config: DiTConfig) -> list[int]:
    """Those of queries, keys and values."""
    assert config.llama is not None
    shared = config.width // config.heads * (config.llama.kv_heads or config.heads)
    return [config.width, shared, shared]


def _split_shapes(config: DiTConfig, fused: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The shapes of the parts of what is one matrix here, under the names that they have in between."""
    assert config.llama is not None
    expected = dict(fused)
    for i in range(config.depth):
        for part, width in zip(("query", "key", "value"), _widths(config), strict=True):
            expected[f"blocks.{i}.{part}.weight"] = torch.Size([width, config.width])
            expected[f"blocks.{i}.{part}.bias"] = torch.Size([width])
        for part in ("gate", "up"):
            expected[f"blocks.{i}.{part}.weight"] = torch.Size([config.llama.hidden, config.width])
    return expected


def _table(names: Names, config: DiTConfig) -> dict[str, str]:
    """Their names to ours or, of parts of what is one matrix here, those that these have in between."""
    assert config.llama is not None
    table = {f"{names.embedding}.weight": "embedding.weight", f"{names.norm}.weight": "norm.weight"}
    if not config.tied:
        table[f"{names.output}.weight"] = "output.weight"
    for i in range(config.depth):
        theirs = names.block.format(i)
        for part in ("norm1", "norm2", "query", "key", "value", "out", "gate", "up", "down"):
            ours = f"blocks.{i}.{PARTS.get(part, part)}"
            table[f"{theirs}.{getattr(names, part)}.weight"] = f"{ours}.weight"
            if config.llama.bias and part in ("query", "key", "value"):
                table[f"{theirs}.{getattr(names, part)}.bias"] = f"{ours}.bias"
    return table
