"""The published format of Caduceus (as in `kuleshov-group/caduceus-ps_seqlen-131k_d_model-256_n_layer-16`).

Published networks of both strands (`rcps`) with `fused_add_norm`, which all have, exchange the two halves of the
channels in every block: seen from one strand, blocks with even index read the text and its channels backwards. Such
weights are converted exactly to a network without exchanges, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from unmask.backbones.caduceus import CaduceusConfig
from unmask.data.tokenizers import Tokenizer
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._state_space import (
    mixer_names,
    padded_vocab,
    read_state_space,
    rename_state,
    write_state_space,
)
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab

_MASK_ID = 3
"""The mask of the published tokenizer; configs do not name it."""
_CONTEXT_KEY = "context_token_ids"
"""Where we write the ids that are never predicted; published configs do not have it."""
_T = TypeVar("_T")
_PREFIX = "caduceus.backbone."
_STRATEGIES = {"add": "add", "ew_multiply": "multiply"}


@dataclass(frozen=True)
class _CaduceusFormat:
    """A Caduceus-Ph or Caduceus-PS whose head shares the matrix of the embedding."""

    model_type: str = "caduceus"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        reader.require(
            bidirectional=True,
            bidirectional_weight_tie=True,
            bidirectional_strategy=tuple(_STRATEGIES),
            rms_norm=True,
            tie_word_embeddings=True,
        )
        vocab = padded_vocab(reader, _MASK_ID)
        complement = _read_complement(config.get("complement_map"), vocab, where)
        vocab = replace(vocab, context_ids=_read_context_ids(reader, vocab, complement))
        equivariant, fused = reader.get_bool("rcps", False), reader.get_bool("fused_add_norm", True)
        exchanged = equivariant and fused
        width, depth = reader.get_int("d_model"), reader.get_depth("n_layer", weights)
        backbone = CaduceusConfig(
            width=width,
            depth=depth,
            state_space=read_state_space(config, width, where),
            norm_eps=reader.get_float("norm_epsilon", 1e-5),
            strategy=_STRATEGIES[config.get("bidirectional_strategy", "add")],
            equivariant=equivariant,
            complement_ids=complement,
            exchanged_head=exchanged and depth % 2 == 1,
        )
        names = _names(backbone, fused)
        network = {name: tensor for name, tensor in weights.items() if name not in _BUFFERS or not equivariant}
        tensors = rename_state(network, names, backbone, vocab, where, "a Caduceus")
        tensors |= _check_complement(tensors, weights, backbone, where)
        schedule = LogLinear(eps=1e-3)
        model_config = ModelConfig(vocab, backbone, MDLM(schedule=schedule))
        return model_config, _exchange(tensors, depth, _flip_lazily) if exchanged else tensors

    def can_export(self, model: LanguageModel) -> bool:
        config = model.denoiser.config
        return isinstance(config.backbone, CaduceusConfig) and isinstance(config.objective, MDLM)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        backbone, vocab = model.denoiser.config.backbone, model.denoiser.config.vocab
        assert isinstance(backbone, CaduceusConfig)  # see can_export
        is_odd = backbone.depth % 2 == 1
        if backbone.exchanged_head and not is_odd:
            raise ValueError("Caduceus' format exchanges the head's strands only if the number of blocks is odd")
        fused = not backbone.equivariant or backbone.exchanged_head == is_odd
        ours: Mapping[str, Tensor] = model.denoiser.backbone.state_dict()
        if backbone.equivariant and fused:
            ours = _exchange(ours, backbone.depth, lambda tensor, dim: tensor.flip(dim))
        tensors = {theirs: ours[name].clone() for theirs, name in _names(backbone, fused).items()}
        if backbone.equivariant:
            complement = torch.tensor(backbone.complement_ids)
            tensors |= {name: complement.clone() for name in _BUFFERS}
        return _write_config(backbone, vocab, fused), tensors


CADUCEUS_FORMAT = _CaduceusFormat()

_BUFFERS = (f"{_PREFIX}embeddings.word_embeddings.complement_map", "lm_head.complement_map")


def _write_config(backbone: CaduceusConfig, vocab: Vocab, fused: bool) -> dict[str, Any]:
    complement = backbone.complement_ids or tuple(range(vocab.size))
    return {
        "model_type": "caduceus",
        "architectures": ["CaduceusForMaskedLM"],
        "d_model": backbone.width,
        "n_layer": backbone.depth,
        "vocab_size": vocab.size,
        "ssm_cfg": write_state_space(backbone),
        "rms_norm": True,
        "fused_add_norm": fused,
        "residual_in_fp32": False,
        "norm_epsilon": backbone.norm_eps,
        "pad_vocab_size_multiple": 8 if vocab.size % 8 == 0 else 1,
        "bidirectional": True,
        "bidirectional_strategy": {ours: theirs for theirs, ours in _STRATEGIES.items()}[backbone.strategy],
        "bidirectional_weight_tie": True,
        "rcps": backbone.equivariant,
        "complement_map": {str(token): other for token, other in enumerate(complement)},
        "mask_token_id": vocab.mask_id,
        "eos_token_id": vocab.eos_id,
        _CONTEXT_KEY: list(vocab.context_ids),
        "torch_dtype": "float32",
    }


def _read_complement(given: Any, vocab: Vocab, where: str) -> tuple[int, ...]:
    """The complement of each id, read by its key: programs that sort the keys as text change their order."""
    if given is None:
        return ()
    try:
        by_id = {int(token): int(other) for token, other in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{where}: config.json's 'complement_map' must map token ids to token ids") from None
    return tuple(by_id.get(token, token) for token in range(vocab.size))


def _read_context_ids(reader: ConfigReader, vocab: Vocab, complement: tuple[int, ...]) -> tuple[int, ...]:
    """The ids that are never predicted: those that the config names or, of the published tokenizer, N and others."""
    if _CONTEXT_KEY in reader.config:
        return reader.get_token_ids(_CONTEXT_KEY)
    dna = Tokenizer.dna()
    is_published = complement == dna.complement_ids and vocab.mask_id == dna.mask_id
    return dna.context_ids if is_published else ()


def _check_complement(
    tensors: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor], backbone: CaduceusConfig, where: str
) -> dict[str, LazyTensor]:
    """The embedding; reading it refuses stored complements that are not those of the config."""
    embedding = "embedding.weight"
    stored = {name: weights[name] for name in _BUFFERS if backbone.equivariant and name in weights}

    def checked(values: Tensor, *complements: Tensor) -> Tensor:
        for name, complement in zip(stored, complements, strict=True):
            if tuple(complement.tolist()) != backbone.complement_ids:
                raise ValueError(f"{where}: {name} in the weights is not the complement_map of config.json")
        return values.clone()

    return {embedding: LazyTensor.computed(checked, tensors[embedding], *stored.values())} if stored else {}


def _names(backbone: CaduceusConfig, fused: bool) -> dict[str, str]:
    """Their names to ours."""
    inner = "embedding." if backbone.equivariant else ""
    norm = "" if fused or not backbone.equivariant else "submodule."
    mixer = "mixer.submodule." if backbone.equivariant else "mixer."
    names = {
        f"{_PREFIX}embeddings.word_embeddings.{inner}weight": "embedding.weight",
        f"{_PREFIX}norm_f.{norm}weight": "norm.weight",
    }
    for i in range(backbone.depth):
        block = f"{_PREFIX}layers.{i}."
        names[f"{block}norm.{norm}weight"] = f"layers.{i}.norm.weight"
        directions = {"mamba_fwd.": "ssm.", "mamba_rev.": "reverse_ssm."}
        names |= mixer_names(f"{block}{mixer}", f"layers.{i}.mixer.", directions)
    return names


def _flip_lazily(tensor: LazyTensor, dim: int) -> LazyTensor:
    return LazyTensor.computed(lambda values: values.flip(dim), tensor)


def _exchange(tensors: Mapping[str, _T], depth: int, flip: Callable[[_T, int], _T]) -> dict[str, _T]:
    """The same network with exchanged halves from one without, or the other way round.

    Blocks with even index read the channels backwards, and the text: their directions change places. After an odd
    number of blocks the last norm reads the channels backwards, too.
    """
    result = dict(tensors)
    for i in range(0, depth, 2):
        block = f"layers.{i}."
        for name, dim in (("norm.weight", 0), ("mixer.in_proj.weight", 1), ("mixer.out_proj.weight", 0)):
            result[block + name] = flip(tensors[block + name], dim)
        for name in [name for name in tensors if name.startswith(f"{block}mixer.ssm.")]:
            other = name.replace(".ssm.", ".reverse_ssm.")
            result[name], result[other] = tensors[other], tensors[name]
    if depth % 2:
        result["norm.weight"] = flip(tensors["norm.weight"], 0)
    return result
