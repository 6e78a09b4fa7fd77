"""The published MosaicBERT format (as in `mosaicml/mosaic-bert-base`): BERT's names, with fused projections.

Its `model_type` is that of BERT; ALiBi's key tells it apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.mosaic_bert import MosaicBERTConfig
from unmask.config import from_json, to_json
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, Objective
from unmask.pretrained._config_checks import ConfigReader, meta_shapes, rename_tensors
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab

_ALIBI_KEY = "alibi_starting_size"
_OBJECTIVE_KEY = "unmask_objective"
"""Our objective; in published folders there is none."""
_BERT_VOCAB_SIZES, _BERT_MASK_ID = range(30_522, 30_529), 103
"""BERT's vocabulary, also padded to a multiple of 8, and its [MASK]."""

_MODEL_NAMES = {
    "bert.embeddings.word_embeddings.weight": "embedding.weight",
    "bert.embeddings.token_type_embeddings.weight": "token_type_embedding.weight",
    "bert.embeddings.LayerNorm": "embedding_norm",
    "cls.predictions.transform.dense": "head_transform",
    "cls.predictions.transform.LayerNorm": "head_norm",
    "cls.predictions.decoder.bias": "lm_head.bias",
}
_BLOCK_NAMES = {
    "attention.self.Wqkv": "qkv",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "attention_norm",
    "mlp.gated_layers.weight": "gate_up.weight",
    "mlp.wo": "down",
    "mlp.layernorm": "mlp_norm",
}
_TIED_TENSORS = frozenset({"cls.predictions.decoder.weight", "cls.predictions.bias"})
"""Copies of the word embeddings and of the head's bias, which some files have."""


@dataclass(frozen=True)
class _MosaicBERTFormat:
    """A masked language model; without an objective of ours it is read by SUBS, as MDLM's."""

    model_type: str = "bert"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type and _ALIBI_KEY in config

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        reader.require(hidden_act="gelu", attention_probs_dropout_prob=(0, 0.0))
        backbone = MosaicBERTConfig(
            width=reader.get_int("hidden_size"),
            depth=reader.get_depth("num_hidden_layers", weights),
            heads=reader.get_int("num_attention_heads"),
            intermediate_size=reader.get_int("intermediate_size"),
            max_length=reader.get_int("max_position_embeddings", 512),
            dropout=reader.get_float("hidden_dropout_prob", 0.1),
            token_types=reader.get_int("type_vocab_size", 2),
            norm_eps=reader.get_float("layer_norm_eps", 1e-12),
        )
        vocab = _read_vocab(reader, weights)
        expected = meta_shapes(backbone, vocab, weights, where)
        tensors = rename_tensors(weights, _name_table(backbone.depth), expected, where, "a MosaicBERT", _TIED_TENSORS)
        objective: Objective = MDLM()
        if _OBJECTIVE_KEY in config:
            objective = from_json(Objective, config[_OBJECTIVE_KEY], f"{where}: config.json's {_OBJECTIVE_KEY}")
        return ModelConfig(vocab, backbone, objective), tensors

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.denoiser.config.backbone, MosaicBERTConfig)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = model.denoiser.config
        backbone, vocab = config.backbone, config.vocab
        assert isinstance(backbone, MosaicBERTConfig)
        if backbone.causal:
            raise ValueError(
                "MosaicBERT's format cannot hold a causal network; train it with another objective than ar"
            )
        ours = model.denoiser.backbone.state_dict()
        tensors = {theirs: ours[name].clone() for theirs, name in _name_table(backbone.depth).items()}
        length = backbone.max_length or 512
        return {
            "architectures": ["BertForMaskedLM"],
            "model_type": self.model_type,
            _ALIBI_KEY: length,
            "attention_probs_dropout_prob": 0.0,
            "hidden_act": "gelu",
            "hidden_dropout_prob": backbone.dropout,
            "hidden_size": backbone.width,
            "initializer_range": 0.02,
            "intermediate_size": backbone.intermediate_size,
            "layer_norm_eps": backbone.norm_eps,
            "mask_token_id": vocab.mask_id,
            "eos_token_id": vocab.eos_id,
            "max_position_embeddings": length,
            "num_attention_heads": backbone.heads,
            "num_hidden_layers": backbone.depth,
            "torch_dtype": "float32",
            "type_vocab_size": backbone.token_types,
            "vocab_size": vocab.size,
            _OBJECTIVE_KEY: to_json(config.objective),
        }, tensors


MOSAIC_BERT_FORMAT = _MosaicBERTFormat()


def _read_vocab(reader: ConfigReader, weights: dict[str, LazyTensor]) -> Vocab:
    """As many ids as there are embeddings: files may pad them to a multiple of 8.

    Published configs do not name the mask: it is that of BERT's vocabulary or, in any other, the last id.
    """
    embeddings = weights.get("bert.embeddings.word_embeddings.weight")
    rows, stated = 0 if embeddings is None else len(embeddings), reader.get_int("vocab_size")
    size = rows if stated <= rows < stated + 8 else stated
    default = _BERT_MASK_ID if size in _BERT_VOCAB_SIZES else size - 1
    mask_id = reader.get_token_id("mask_token_id") if "mask_token_id" in reader.config else default
    eos_id = reader.get_token_id("eos_token_id") if reader.config.get("eos_token_id") is not None else None
    return Vocab(size, mask_id, eos_id)


def _name_table(depth: int) -> dict[str, str]:
    """Their tensor names to ours."""
    pairs = dict(_MODEL_NAMES)
    for i in range(depth):
        pairs |= {f"bert.encoder.layer.{i}.{theirs}": f"layers.{i}.{ours}" for theirs, ours in _BLOCK_NAMES.items()}
    table: dict[str, str] = {}
    for theirs, ours in pairs.items():
        whole = theirs.endswith((".weight", ".bias"))
        table |= {theirs: ours} if whole else {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}
    return table
