"""Our networks as the transformers library opens them with `AutoModelForMaskedLM`.

Llama blocks that attend both ways are a EuroBERT, which transformers has. Any other network of masked diffusion is an
`UnmaskForMaskedLM`, which `import unmask.hf` adds to transformers; its tensors are a denoiser's. Everything that
transformers has no keys for is our own config, under the key `unmask`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.config import from_json, to_json
from unmask.model import LanguageModel, ModelConfig
from unmask.pretrained._config_checks import require_dit
from unmask.pretrained.formats import _hf as hf
from unmask.pretrained.formats._llama import TRANSFORMERS_KEYS, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES, fuse_projections, named
from unmask.pretrained.state_dict import LazyTensor, unique_tensors

_KEY = "unmask"
_PREFIX, _NETWORK_PREFIX = "denoiser.", "denoiser.backbone."
_CONSTANTS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_EUROBERT = LlamaFormat(
    "eurobert",
    named(TRANSFORMERS_NAMES, "a EuroBERT"),
    TRANSFORMERS_KEYS,
    required=_CONSTANTS,
    constants={"architectures": ["EuroBertForMaskedLM"], "bos_token_id": None, **_CONSTANTS},
    default_norm_eps=1e-5,
)


@dataclass(frozen=True)
class _TransformersFormat:
    """Masked diffusion with any objective and schedule; networks of transformers stay what they are."""

    model_type: str = "transformers"

    def can_load(self, config: dict[str, Any]) -> bool:
        stored = config.get(_KEY)
        return isinstance(stored, dict) and "backbone" in stored

    def load_state(
        self, config: dict[str, Any], weights: dict[str, LazyTensor], where: str
    ) -> tuple[ModelConfig, dict[str, LazyTensor]]:
        ours: ModelConfig = from_json(ModelConfig, config[_KEY], f"{where}: config.json's {_KEY}")
        if config.get("model_type") == _EUROBERT.model_type:
            backbone = require_dit(ours.backbone)
            return ours, fuse_projections(weights, _EUROBERT.tensor_names, backbone, ours.vocab, where)
        return ours, {
            name.removeprefix(_NETWORK_PREFIX).removeprefix(_PREFIX): tensor for name, tensor in weights.items()
        }

    def can_export(self, model: LanguageModel) -> bool:
        return hf.can_export(model) or (model.denoiser.process.has_masks and not model.denoiser.process.is_continuous)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if hf.can_export(model):
            return hf.export_state(model)
        ours = {_KEY: to_json(model.denoiser.config)}
        if _is_eurobert(model.denoiser.config):
            config, tensors = _EUROBERT.export_network(model)
            return {**config, **ours}, tensors
        size = {"vocab_size": model.vocab.size, "mask_token_id": model.vocab.mask_id}
        config = {"model_type": _KEY, "architectures": ["UnmaskForMaskedLM"], "dtype": "float32", **size, **ours}
        state = {f"{_PREFIX}{name}": tensor for name, tensor in model.denoiser.state_dict().items()}
        return config, unique_tensors(state)


TRANSFORMERS_FORMAT = _TransformersFormat()


def _is_eurobert(config: ModelConfig) -> bool:
    """Whether the network computes what EuroBERT's does: Llama blocks without biases, experts and norms of heads."""
    backbone = config.backbone
    if not isinstance(backbone, DiTConfig) or backbone.llama is None or config.objective.process.block_size is not None:
        return False
    plain = replace(
        backbone,
        time_conditioning=None,
        local_init=None,
        causal=False,
        qk_norm=False,
        shift_logits=False,
        llama=replace(backbone.llama, qkv_bias=False, rotary_fraction=1.0, experts=None),
    )
    return backbone == plain and backbone.width % backbone.heads == 0
