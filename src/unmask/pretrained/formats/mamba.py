"""The published formats of Mamba: of `transformers` (`MambaForCausalLM`), and of the `mamba_ssm` package.

They differ in their configs and in one name. Neither says which id begins a text, which is the mask here: if the config
has no `mask_token_id`, it is the last id, one of those by which vocabularies are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.mamba import MambaConfig
from unmask.backbones.state_space import StateSpace
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import NextToken
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._state_space import (
    mixer_names,
    padded_vocab,
    read_dt_rank,
    read_state_space,
    rename_state,
    write_state_space,
)
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab


@dataclass(frozen=True)
class _MambaFormat:
    """A causal Mamba whose head shares the matrix of the embedding, in the format of transformers."""

    model_type: str = "mamba"
    embedding: str = "backbone.embeddings.weight"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader = ConfigReader(config, where)
        backbone = self._read_backbone(reader, weights)
        vocab = padded_vocab(reader, None)
        tensors = rename_state(weights, self._names(backbone), backbone, vocab, where, "a Mamba")
        return ModelConfig(vocab, backbone, NextToken()), tensors

    def _read_backbone(self, reader: ConfigReader, weights: dict[str, LazyTensor]) -> MambaConfig:
        reader.require(
            use_bias=False, use_conv_bias=True, hidden_act="silu", tie_word_embeddings=True, use_falcon_mamba=False
        )
        width = reader.get_int("hidden_size")
        return MambaConfig(
            width=width,
            depth=reader.get_depth("num_hidden_layers", weights),
            state_space=StateSpace(
                state_size=reader.get_int("state_size", 16),
                kernel_size=reader.get_int("conv_kernel", 4),
                expand=reader.get_int("expand", 2),
                dt_rank=read_dt_rank(reader, "time_step_rank", width),
                dt_min=reader.get_float("time_step_min", 0.001),
                dt_max=reader.get_float("time_step_max", 0.1),
            ),
            norm_eps=reader.get_float("layer_norm_epsilon", 1e-5),
        )

    def _names(self, backbone: MambaConfig) -> dict[str, str]:
        names = {self.embedding: "embedding.weight", "backbone.norm_f.weight": "norm.weight"}
        for i in range(backbone.depth):
            block = f"backbone.layers.{i}."
            names[f"{block}norm.weight"] = f"layers.{i}.norm.weight"
            names |= mixer_names(f"{block}mixer.", f"layers.{i}.mixer.", {"": "ssm."})
        return names

    def can_export(self, model: LanguageModel) -> bool:
        config = model.denoiser.config
        return isinstance(config.backbone, MambaConfig) and isinstance(config.objective, NextToken)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        backbone, vocab = model.denoiser.config.backbone, model.denoiser.config.vocab
        assert isinstance(backbone, MambaConfig)  # see can_export
        ours = model.denoiser.backbone.state_dict()
        tensors = {theirs: ours[name].clone() for theirs, name in self._names(backbone).items()}
        return self._write_config(backbone, vocab), tensors

    def _write_config(self, backbone: MambaConfig, vocab: Vocab) -> dict[str, Any]:
        sizes = backbone.state_space
        return {
            "model_type": self.model_type,
            "architectures": ["MambaForCausalLM"],
            "vocab_size": vocab.size,
            "hidden_size": backbone.width,
            "intermediate_size": sizes.expand * backbone.width,
            "num_hidden_layers": backbone.depth,
            "state_size": sizes.state_size,
            "conv_kernel": sizes.kernel_size,
            "expand": sizes.expand,
            "time_step_rank": sizes.dt_rank or -(-backbone.width // 16),
            "time_step_min": sizes.dt_min,
            "time_step_max": sizes.dt_max,
            "layer_norm_epsilon": backbone.norm_eps,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "residual_in_fp32": True,
            "tie_word_embeddings": True,
            "mask_token_id": vocab.mask_id,
            "eos_token_id": vocab.eos_id,
            "bos_token_id": vocab.eos_id,
            "pad_token_id": vocab.eos_id,
        }


@dataclass(frozen=True)
class _MambaSSMFormat(_MambaFormat):
    """The same in the format of mamba_ssm, whose config has no `model_type`."""

    model_type: str = "mamba_ssm"
    embedding: str = "backbone.embedding.weight"

    def can_load(self, config: dict[str, Any]) -> bool:
        return "model_type" not in config and "format" not in config and {"d_model", "n_layer"} <= config.keys()

    def _read_backbone(self, reader: ConfigReader, weights: dict[str, LazyTensor]) -> MambaConfig:
        reader.require(rms_norm=True, d_intermediate=0, attn_layer_idx=([],), tie_embeddings=True)
        width = reader.get_int("d_model")
        return MambaConfig(
            width=width,
            depth=reader.get_depth("n_layer", weights),
            state_space=read_state_space(reader.config, width, reader.where),
            norm_eps=reader.get_float("norm_epsilon", 1e-5),
        )

    def can_export(self, model: LanguageModel) -> bool:
        """Models are saved in the format of transformers; this one is for those who ask for it."""
        return False

    def _write_config(self, backbone: MambaConfig, vocab: Vocab) -> dict[str, Any]:
        return {
            "d_model": backbone.width,
            "n_layer": backbone.depth,
            "vocab_size": vocab.size,
            "ssm_cfg": write_state_space(backbone),
            "rms_norm": True,
            "norm_epsilon": backbone.norm_eps,
            "residual_in_fp32": True,
            "fused_add_norm": True,
            "pad_vocab_size_multiple": 1,
            "mask_token_id": vocab.mask_id,
            "eos_token_id": vocab.eos_id,
        }


MAMBA_FORMAT = _MambaFormat()
MAMBA_SSM_FORMAT = _MambaSSMFormat()
