"""The format of DiMamba checkpoints of the MDLM paper's code: its config, and the tensors of its network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.backbones.dimamba import DiMambaConfig
from unmask.backbones.dit import TimeConditioning
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._state_space import mixer_names, rename_state
from unmask.pretrained.state_dict import LazyTensor
from unmask.types import Vocab

_PREFIX = "model.bimamba.backbone."


@dataclass(frozen=True)
class _DiMambaFormat:
    """A DiMamba with adaLN; the mask is the last id. Without time conditioning it is told sigma = 0."""

    model_type: str = "dimamba"

    def can_load(self, config: dict[str, Any]) -> bool:
        model = config.get("model")
        return isinstance(model, dict) and model.get("type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        reader, model = ConfigReader(config, where), ConfigReader(config["model"], where)
        model.require(temb_strategy="adaln")
        size = reader.get_int("vocab_size")
        backbone = DiMambaConfig(
            width=model.get_int("hidden_size"),
            depth=model.get_depth("n_blocks", weights),
            max_length=model.get_int("length"),
            dropout=model.get_float("dropout", 0.1),
            tie_embeddings=model.get_bool("tie_word_embeddings", False),
            time_conditioning=TimeConditioning(model.get_int("cond_dim"), scale=1.0),
            ignore_time=not reader.get_bool("time_conditioning", False),
        )
        vocab = Vocab(size, size - 1)
        tensors = rename_state(weights, _names(backbone), backbone, vocab, where, "a DiMamba")
        return ModelConfig(vocab, backbone, MDLM(schedule=LogLinear(eps=1e-3)), condition_on_sigma=True), tensors

    def can_export(self, model: LanguageModel) -> bool:
        config = model.denoiser.config
        return isinstance(config.backbone, DiMambaConfig) and isinstance(config.objective, MDLM)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = model.denoiser.config
        backbone, vocab = config.backbone, config.vocab
        assert isinstance(backbone, DiMambaConfig)  # see can_export
        plain = DiMambaConfig()
        problems = {
            "the mask is the last id": vocab.mask_id != vocab.size - 1,
            "the network is told sigma, unscaled": not backbone.ignore_time
            and not (config.condition_on_sigma and backbone.time_conditioning.scale == 1),
            "the sizes of the recurrence are the usual ones": (backbone.state_space, backbone.norm_eps)
            != (plain.state_space, plain.norm_eps),
            "there is a longest text": backbone.max_length is None,
        }
        for rule, broken in problems.items():
            if broken:
                raise ValueError(f"in the format of DiMamba {rule}; this model is another")
        ours = model.denoiser.backbone.state_dict()
        tensors = {theirs: ours[name].clone() for theirs, name in _names(backbone).items()}
        return {
            "model_type": self.model_type,
            "model": {
                "type": self.model_type,
                "hidden_size": backbone.width,
                "cond_dim": backbone.time_conditioning.width,
                "length": backbone.max_length,
                "n_blocks": backbone.depth,
                "scale_by_sigma": True,
                "dropout": backbone.dropout,
                "temb_strategy": "adaln",
                "tie_word_embeddings": backbone.tie_embeddings,
            },
            "vocab_size": vocab.size,
            "time_conditioning": not backbone.ignore_time,
        }, tensors


DIMAMBA_FORMAT = _DiMambaFormat()


def _names(backbone: DiMambaConfig) -> dict[str, str]:
    """Their names to ours."""
    names = {
        f"{_PREFIX}embeddings.word_embeddings.weight": "embedding.weight",
        f"{_PREFIX}norm_f.weight": "norm.weight",
        **{f"{_PREFIX}adaLN_modulation_final.{part}": f"modulation.{part}" for part in ("weight", "bias")},
    }
    for layer in ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"):
        names[f"sigma_map.{layer}"] = f"time_embedding.{layer}"
    if not backbone.tie_embeddings:
        names["model.lm_head.weight"] = "lm_head.weight"
    for i in range(backbone.depth):
        block, ours = f"{_PREFIX}layers.{i}.", f"layers.{i}."
        names[f"{block}norm.weight"] = f"{ours}norm.weight"
        names |= {f"{block}adaLN_modulation.{part}": f"{ours}modulation.{part}" for part in ("weight", "bias")}
        directions = {"mamba_fwd.": "ssm.", "mamba_rev.": "reverse_ssm."}
        names |= mixer_names(f"{block}mixer.", f"{ours}mixer.", directions)
    return names
