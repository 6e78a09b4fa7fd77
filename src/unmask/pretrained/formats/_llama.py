"""Formats of networks with Llama blocks: one description for each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from unmask.backbones.dit import DiTConfig, LlamaBlock
from unmask.backbones.layers import RotaryScaling
from unmask.backbones.moe import Experts
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, BlockDiffusion, Objective
from unmask.pretrained._config_checks import ConfigReader, check_exportable, require_dit
from unmask.pretrained.formats._llama_tensors import TensorNames, fuse_projections, split_projections
from unmask.pretrained.state_dict import LazyTensor
from unmask.sampling import Blockwise, Confidence, Sampler
from unmask.types import Vocab

GREEDY = SamplingParams(temperature=0.0)
"""How most published models draw tokens."""
LOW_CONFIDENCE = Blockwise(32, Confidence(32, params=GREEDY))
"""LLaDA's sampler: blocks of 32 tokens, the surest first, one at a time."""


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
    head_dim: str | None = "head_dim"
    """None: a head is as wide as the network divided by its heads."""
    rotary_fraction: str | None = None
    """None: heads are rotated as a whole."""


TRANSFORMERS_KEYS = ConfigKeys(
    width="hidden_size",
    depth="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    intermediate_size="intermediate_size",
    max_length="max_position_embeddings",
    tie_embeddings="tie_word_embeddings",
)


@dataclass(frozen=True)
class Blocks:
    """Block-causal attention: a token attends to its own block and to those before it."""

    size: int | None
    """Tokens per block, where the config does not say it; None: such a model has no blocks."""
    key: str = "block_size"
    """The config's key for it."""
    name_part: str = ""
    """A word in the name of the folder that says that there are blocks; empty: there always are."""
    from_prompt: bool = False
    """Whether blocks are counted from the end of the prompt."""

    def objective(self, reader: ConfigReader) -> Objective:
        """The objective of a model with this config."""
        if reader.config.get(self.key) is None and not _is_named(reader, self.name_part):
            return _OBJECTIVE
        size = reader.get_int(self.key, self.size)
        return BlockDiffusion(block_size=size, schedule=_OBJECTIVE.schedule, from_prompt=self.from_prompt)

    def can_hold(self, objective: Objective) -> bool:
        """Whether the format is for models with this objective."""
        if isinstance(objective, BlockDiffusion):
            return objective.from_prompt == self.from_prompt
        return bool(self.name_part) and isinstance(objective, MDLM)

    def export(self, objective: Objective) -> dict[str, int]:
        """The config's entry."""
        return {self.key: objective.block_size} if isinstance(objective, BlockDiffusion) else {}


class ExpertsFormat(Protocol):
    """How the config of a family states its mixture of experts."""

    def read(self, reader: ConfigReader, depth: int) -> Experts:
        """What a config says."""
        ...

    def export(self, experts: Experts, depth: int) -> dict[str, Any]:
        """The config's entries; ValueError for a mixture that the family does not have."""
        ...


@dataclass(frozen=True)
class LlamaFormat:
    """A published format of Llama networks that were opened: attention both ways, or block-causal.

    All that tells one family from another is a field here.
    """

    model_type: str
    tensor_names: TensorNames
    config_keys: ConfigKeys
    required: Mapping[str, object]
    """The only supported values of other options."""
    constants: Mapping[str, object]
    """Entries that every exported config has."""
    default_norm_eps: float
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether the queries and keys of each head are normalised."""
    shift_logits: bool = False
    mask_ids: Mapping[int | None, int] = field(default_factory=dict)
    """The masks of published models, where neither config nor tokenizer names them, by the size of the vocabulary; None
    stands for all other sizes. Empty: config or tokenizer must."""
    blocks: Blocks | None = None
    """Block-causal attention; None: every token attends to every token."""
    experts: ExpertsFormat | None = None
    """A mixture of experts; None: blocks have a plain MLP."""
    sampler: Sampler | None = None
    """The sampler that the family comes with; None: the one of the model's process."""
    named_samplers: Mapping[str, Sampler] = field(default_factory=dict)
    """Samplers of members of the family that only the name of the folder tells apart, by the part that does."""
    chat_template: str | None = None
    """The chat template of the family (in `CHAT_TEMPLATES`), for folders without one whose vocabulary has its
    tokens."""
    architecture: str | None = None
    """The architecture that tells models of the family apart, where published configs have another's type."""

    def can_load(self, config: dict[str, Any]) -> bool:
        named = config.get("architectures")
        has_architecture = isinstance(named, list) and self.architecture in named
        return config.get("model_type") == self.model_type or has_architecture

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        """Our config and tensors; the schedule is linear."""
        if config.get("mask_token_id") is None and self.mask_ids:
            config = {**config, "mask_token_id": self.mask_ids.get(config.get("vocab_size"), self.mask_ids.get(None))}
        reader, keys = ConfigReader(config, where), self.config_keys
        reader.require(**self.required)
        heads = reader.get_int(keys.heads)
        kv_heads, depth = reader.get_int(keys.kv_heads, heads), reader.get_depth(keys.depth, weights)
        backbone = DiTConfig(
            width=reader.get_int(keys.width),
            depth=depth,
            heads=heads,
            max_length=reader.get_int(keys.max_length),
            dropout=0.0,
            tie_embeddings=reader.get_bool(keys.tie_embeddings, False),
            qk_norm=self.qk_norm,
            rope_theta=_rope_theta(reader, keys.rope_theta),
            llama=LlamaBlock(
                intermediate_size=reader.get_int(keys.intermediate_size),
                kv_heads=None if kv_heads == heads else kv_heads,
                norm_eps=reader.get_float(keys.norm_eps, self.default_norm_eps),
                qkv_bias=self.qkv_bias,
                head_dim=_head_dim(reader, keys, heads),
                rotary_fraction=1.0 if keys.rotary_fraction is None else reader.get_float(keys.rotary_fraction, 1.0),
                rotary_scaling=_rotary_scaling(config, where),
                experts=None if self.experts is None else self.experts.read(reader, depth),
            ),
            shift_logits=self.shift_logits,
        )
        size = reader.get_int(keys.vocab, config.get("vocab_size"))
        ends = _end_ids(reader)
        vocab = Vocab(
            size,
            reader.get_token_id("mask_token_id"),
            eos_id=ends[0] if ends else None,
            stop_ids=ends[1:],
        )
        tensors = fuse_projections(weights, self.tensor_names, backbone, vocab, where)
        objective = _OBJECTIVE if self.blocks is None else self.blocks.objective(reader)
        named = (sampler for part, sampler in self.named_samplers.items() if _is_named(reader, part))
        return ModelConfig(vocab, backbone, objective, sampler=next(named, self.sampler)), tensors

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Their config and tensors: the inverse of `load_state`."""
        objective = model.objective
        assert isinstance(objective, MDLM | BlockDiffusion)
        if objective.schedule != _OBJECTIVE.schedule:
            raise ValueError(
                f"{self.tensor_names.kind} has the linear schedule only: train with --set objective.schedule.eps=0"
            )
        return self.export_network(model)

    def export_network(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The same for a model of any objective, which the config does not name."""
        llama, keys = _require_llama(model, self), self.config_keys
        backbone, vocab = require_dit(model.denoiser.config.backbone), model.vocab
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
            "eos_token_id": list(vocab.end_ids) if vocab.stop_ids else vocab.eos_id,
            "pad_token_id": vocab.eos_id,
            keys.norm_eps: llama.norm_eps,
            keys.tie_embeddings: backbone.tie_embeddings,
            **({} if llama.head_dim is None or keys.head_dim is None else {keys.head_dim: llama.head_dim}),
            **({} if keys.rotary_fraction is None else {keys.rotary_fraction: llama.rotary_fraction}),
            **({} if llama.rotary_scaling is None else {"rope_scaling": _scaling_to_json(llama.rotary_scaling)}),
            **({} if self.blocks is None else self.blocks.export(model.objective)),
            **(
                {}
                if llama.experts is None or self.experts is None
                else self.experts.export(llama.experts, backbone.depth)
            ),
        }, split_projections(model, self.tensor_names)

    def can_export(self, model: LanguageModel) -> bool:
        """Whether the model has Llama blocks of this kind, and shifted logits if this format has them."""
        backbone, objective = model.denoiser.config.backbone, model.objective
        return (
            isinstance(backbone, DiTConfig)
            and backbone.llama is not None
            and backbone.shift_logits == self.shift_logits
            and backbone.qk_norm == self.qk_norm
            and (backbone.llama.experts is None) == (self.experts is None)
            and (isinstance(objective, MDLM) if self.blocks is None else self.blocks.can_hold(objective))
        )


_OBJECTIVE = MDLM(schedule=LogLinear(eps=0.0))

_SCALING_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Our names of the numbers of a rotary scaling, and those of transformers."""


def _rope_theta(reader: ConfigReader, key: str) -> float:
    """The base of the rotary frequencies: transformers 5 stores it one level deeper."""
    deeper = reader.config.get("rope_parameters")
    if key not in reader.config and isinstance(deeper, dict):
        reader = ConfigReader(deeper, reader.where)
    return reader.get_float(key, 10_000.0)


def _rotary_scaling(config: Mapping[str, Any], where: str) -> RotaryScaling | None:
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = stored.get("rope_type", stored.get("type", "default")) if isinstance(stored, dict) else stored
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{where}: config.json has a rope_scaling of type {kind!r}, but only 'llama3' is supported")
    reader = ConfigReader(stored, where)
    factors = {ours: reader.get_float(theirs, 0.0) for ours, theirs in _SCALING_KEYS.items()}
    return RotaryScaling(**{**factors, "original_length": reader.get_int(_SCALING_KEYS["original_length"])})  # type: ignore[arg-type]


def _scaling_to_json(scaling: RotaryScaling) -> dict[str, Any]:
    return {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for ours, theirs in _SCALING_KEYS.items()}}


def _head_dim(reader: ConfigReader, keys: ConfigKeys, heads: int) -> int | None:
    """The width of a head, if it is not the network's width divided by its heads."""
    if keys.head_dim is None or reader.config.get(keys.head_dim) is None:
        return None
    size = reader.get_int(keys.head_dim)
    return None if size * heads == reader.get_int(keys.width) else size


def _end_ids(reader: ConfigReader) -> tuple[int, ...]:
    """The ends of a text: first the one between documents."""
    value = reader.config.get("eos_token_id")
    if isinstance(value, list):
        return reader.get_token_ids("eos_token_id")
    return () if value is None else (reader.get_token_id("eos_token_id"),)


def _is_named(reader: ConfigReader, part: str) -> bool:
    """Whether the name of a model's folder, or of its repository in the hub's cache, has this part."""
    return part in "/".join(Path(reader.where).parts[-3:]).lower()


def _require_llama(model: LanguageModel, format_: LlamaFormat) -> LlamaBlock:
    """The block config of a model that the format can hold; others are refused."""
    backbone = require_dit(model.denoiser.config.backbone)
    llama = backbone.llama
    plain = replace(
        backbone,
        time_conditioning=None,
        local_init=None,
        causal=False,
        qk_norm=format_.qk_norm,
        shift_logits=format_.shift_logits,
        dropout=0.0,
    )
    check_exportable(backbone, plain, format_.tensor_names.kind.removeprefix("a "))
    assert llama is not None  # see can_export
    keys = format_.config_keys
    supported = replace(
        llama,
        rotary_fraction=1.0 if keys.rotary_fraction is None else llama.rotary_fraction,
        head_dim=None if keys.head_dim is None else llama.head_dim,
    )
    if llama != supported:
        raise ValueError(
            f"{format_.tensor_names.kind}'s format cannot hold heads that are partly rotated or have a width of their"
            " own: train with backbone.llama.head_dim=None backbone.llama.rotary_fraction=1"
        )
    if llama.qkv_bias != format_.qkv_bias:
        raise ValueError(
            f"{format_.tensor_names.kind}'s queries, keys and values have {'' if format_.qkv_bias else 'no '}biases:"
            f" train with backbone.llama.qkv_bias={str(format_.qkv_bias).lower()}"
        )
    return llama
