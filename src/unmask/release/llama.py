"""Networks of Llama blocks as DiTs of ours: projections that read the same input are one matrix here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unmask.backbones.dit import DiTConfig, Llama
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.release.layout import fitting, flag, index, integer, layers, number, only, own, renamed, shapes
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


@dataclass(frozen=True)
class Keys:
    """What a layout's config calls the sizes of a network."""

    width: str
    depth: str
    heads: str
    kv_heads: str
    hidden: str
    length: str
    tied: str
    rotary_base: str = "rope_theta"
    eps: str = "rms_norm_eps"
    vocab: str = "vocab_size"


@dataclass(frozen=True)
class Layout:
    """A published layout of bidirectional Llama networks: all that makes it differ from another."""

    names: Names
    keys: Keys
    expected: Mapping[str, object]
    """What the config may say of other options: only this."""
    stated: Mapping[str, object]
    """What it says of itself."""
    default_eps: float
    bias: bool = False
    shifted: bool = False

    def read(
        self, config: dict[str, Any], weights: dict[str, Tensor], where: str
    ) -> tuple[ModelConfig, dict[str, Tensor]]:
        """Our config and weights for a published model; its schedule is linear."""
        only(config, where, **self.expected)
        keys = self.keys
        heads = integer(config, keys.heads, where)
        kv_heads = integer(config, keys.kv_heads, where, heads)
        backbone = DiTConfig(
            width=integer(config, keys.width, where),
            depth=layers(config, keys.depth, where, weights),
            heads=heads,
            length=integer(config, keys.length, where),
            dropout=0.0,
            tied=flag(config, keys.tied, where, False),
            rotary_base=number(config, keys.rotary_base, where, 10_000.0),
            llama=Llama(
                hidden=integer(config, keys.hidden, where),
                kv_heads=None if kv_heads == heads else kv_heads,
                eps=number(config, keys.eps, where, self.default_eps),
                bias=self.bias,
            ),
            shifted=self.shifted,
        )
        end = None if config.get("eos_token_id") is None else index(config, "eos_token_id", where)
        size = integer(config, keys.vocab, where, config.get("vocab_size"))
        vocab = Vocab(size, index(config, "mask_token_id", where), end)
        return ModelConfig(vocab, backbone, LINEAR), fused(weights, self.names, backbone, vocab, where)

    def write(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A network of Llama blocks in the published layout: the inverse of `read`, exactly."""
        llama, keys = _plain(model, self), self.keys
        config = model.denoise.config
        backbone, vocab = own(config.backbone), config.vocab
        assert isinstance(config.objective, MDLM)
        if config.objective.schedule != LINEAR.schedule:
            raise ValueError(
                f"{self.names.kind}'s layout holds models of the linear schedule only, which"
                " --set objective.schedule.eps=0 trains"
            )
        return {
            **self.stated,
            keys.width: backbone.width,
            keys.heads: backbone.heads,
            keys.kv_heads: llama.kv_heads or backbone.heads,
            keys.depth: backbone.depth,
            keys.hidden: llama.hidden,
            keys.rotary_base: backbone.rotary_base,
            keys.length: backbone.length,
            keys.vocab: vocab.size,
            "vocab_size": vocab.size,
            "mask_token_id": vocab.mask,
            "eos_token_id": vocab.end,
            "pad_token_id": vocab.end,
            keys.eps: llama.eps,
            keys.tied: backbone.tied,
        }, split(model, self.names)

    def writes(self, model: LanguageModel) -> bool:
        """Whether this is the layout of such a model."""
        backbone = model.denoise.config.backbone
        return (
            isinstance(backbone, DiTConfig)
            and backbone.llama is not None
            and backbone.shifted == self.shifted
            and isinstance(model.objective, MDLM)
        )


LINEAR = MDLM(schedule=LogLinear(eps=0.0))

PARTS = {"norm1": "norm1", "norm2": "norm2", "out": "attention.out", "down": "mlp.2"}
"""Parts of a block that are one tensor in both layouts."""


def fused(
    weights: Mapping[str, Tensor], names: Names, backbone: DiTConfig, vocab: Vocab, where: str
) -> dict[str, Tensor]:
    """The tensors of our network from published ones."""
    expected = shapes(backbone, vocab, weights, where)
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


def _plain(model: LanguageModel, layout: Layout) -> Llama:
    """The blocks of a model that the layout can hold; what it cannot is refused."""
    backbone = own(model.denoise.config.backbone)
    llama = backbone.llama
    plain = replace(
        backbone, time=None, local=None, causal=False, qk_norm=False, shifted=layout.shifted, dropout=0.0
    )
    fitting(backbone, plain, layout.names.kind.removeprefix("a "))
    assert llama is not None  # or it would not be written in this layout
    if llama.bias != layout.bias:
        raise ValueError(
            f"{layout.names.kind}'s queries, keys and values have {'' if layout.bias else 'no '}biases:"
            f" train with backbone.llama.bias={str(layout.bias).lower()}"
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
