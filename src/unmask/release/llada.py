"""The published LLaDA layout (as in `GSAI-ML/LLaDA-8B-Base`): Llama blocks that look to both sides."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unmask.backbones.dit import DiTConfig, Llama
from unmask.diffusion.schedule import LogLinear
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM
from unmask.release.layout import flag, index, integer, number, only, own
from unmask.release.llama import Names, check_plain, fused, split
from unmask.types import Vocab

MODEL_TYPE = "llada"
NAMES = Names(
    kind="a LLaDA",
    embedding="model.transformer.wte",
    norm="model.transformer.ln_f",
    output="model.transformer.ff_out",
    block="model.transformer.blocks.{}",
    norm1="attn_norm",
    norm2="ff_norm",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    out="attn_out",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)
EXPECTED = {
    "block_type": "llama",
    "activation_type": ("silu", "swiglu"),
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "alibi": False,
    "rope": True,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "scale_logits": False,
    "input_emb_norm": False,
    "multi_query_attention": (False, None),
    "clip_qkv": None,
}


def read(
    config: dict[str, Any], weights: dict[str, Tensor], where: str
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights for a published model; its schedule is linear."""
    only(config, where, **EXPECTED)
    heads = integer(config, "n_heads", where)
    kv_heads = integer(config, "n_kv_heads", where, heads)
    size = integer(config, "vocab_size", where)
    backbone = DiTConfig(
        width=integer(config, "d_model", where),
        depth=integer(config, "n_layers", where),
        heads=heads,
        length=integer(config, "max_sequence_length", where),
        dropout=0.0,
        tied=flag(config, "weight_tying", where, False),
        rotary_base=number(config, "rope_theta", where, 10_000.0),
        llama=Llama(
            hidden=integer(config, "mlp_hidden_size", where),
            kv_heads=None if kv_heads == heads else kv_heads,
            eps=number(config, "rms_norm_eps", where, 1e-5),
        ),
    )
    end = index(config, "eos_token_id", where) if config.get("eos_token_id") is not None else None
    vocab = Vocab(integer(config, "embedding_size", where, size), index(config, "mask_token_id", where), end)
    return ModelConfig(vocab, backbone, MDLM(schedule=LogLinear(eps=0.0))), fused(
        weights, NAMES, backbone, vocab, where
    )


def write(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A network of Llama blocks in the published layout: the inverse of `read`, exactly."""
    llama = check_plain(model, "LLaDA", bias=False, shifted=False)
    config = model.denoise.config
    backbone, vocab = own(config.backbone), config.vocab
    if config.objective != MDLM(schedule=LogLinear(eps=0.0)):
        raise ValueError("LLaDA's layout holds models of the linear schedule only: MDLM(LogLinear(eps=0))")
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "include_bias": False,
        "d_model": backbone.width,
        "n_heads": backbone.heads,
        "n_kv_heads": llama.kv_heads or backbone.heads,
        "n_layers": backbone.depth,
        "mlp_hidden_size": llama.hidden,
        "rope_theta": backbone.rotary_base,
        "max_sequence_length": backbone.length,
        "vocab_size": vocab.size,
        "embedding_size": vocab.size,
        "mask_token_id": vocab.mask,
        "eos_token_id": vocab.end,
        "pad_token_id": vocab.end,
        "rms_norm_eps": llama.eps,
        "weight_tying": backbone.tied,
    }, split(model, NAMES)


def writes(model: LanguageModel) -> bool:
    """Whether this is the layout of such a model."""
    backbone = model.denoise.config.backbone
    if not isinstance(backbone, DiTConfig):
        return False
    return backbone.llama is not None and not backbone.shifted and isinstance(model.objective, MDLM)
