"""The published Dream layout (as in `Dream-org/Dream-v0-Base-7B`): Qwen2 with its eyes opened.

It began as an autoregressive model, and still predicts a token where the one before it is read.
"""

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

MODEL_TYPE = "Dream"
NAMES = Names(
    kind="a Dream",
    embedding="model.embed_tokens",
    norm="model.norm",
    output="lm_head",
    block="model.layers.{}",
    norm1="input_layernorm",
    norm2="post_attention_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
EXPECTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "rope_scaling": None,
    "attention_dropout": (0, 0.0),
}


def read(
    config: dict[str, Any], weights: dict[str, Tensor], where: str
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights for a published model; its schedule is linear."""
    only(config, where, **EXPECTED)
    heads = integer(config, "num_attention_heads", where)
    kv_heads = integer(config, "num_key_value_heads", where, heads)
    backbone = DiTConfig(
        width=integer(config, "hidden_size", where),
        depth=integer(config, "num_hidden_layers", where),
        heads=heads,
        length=integer(config, "max_position_embeddings", where),
        dropout=0.0,
        tied=flag(config, "tie_word_embeddings", where, False),
        rotary_base=number(config, "rope_theta", where, 10_000.0),
        llama=Llama(
            hidden=integer(config, "intermediate_size", where),
            kv_heads=None if kv_heads == heads else kv_heads,
            eps=number(config, "rms_norm_eps", where, 1e-6),
            bias=True,
        ),
        shifted=True,
    )
    end = index(config, "eos_token_id", where) if config.get("eos_token_id") is not None else None
    vocab = Vocab(integer(config, "vocab_size", where), index(config, "mask_token_id", where), end)
    return ModelConfig(vocab, backbone, MDLM(schedule=LogLinear(eps=0.0))), fused(
        weights, NAMES, backbone, vocab, where
    )


def write(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A shifted network of Llama blocks in the published layout: the inverse of `read`, exactly."""
    llama = check_plain(model, "Dream", bias=True, shifted=True)
    config = model.denoise.config
    backbone, vocab = own(config.backbone), config.vocab
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["DreamModel"],
        "hidden_act": "silu",
        "hidden_size": backbone.width,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": llama.kv_heads or backbone.heads,
        "num_hidden_layers": backbone.depth,
        "intermediate_size": llama.hidden,
        "rope_theta": backbone.rotary_base,
        "max_position_embeddings": backbone.length,
        "vocab_size": vocab.size,
        "mask_token_id": vocab.mask,
        "eos_token_id": vocab.end,
        "pad_token_id": vocab.end,
        "rms_norm_eps": llama.eps,
        "tie_word_embeddings": backbone.tied,
    }, split(model, NAMES)


def writes(model: LanguageModel) -> bool:
    """Whether this is the layout of such a model."""
    backbone = model.denoise.config.backbone
    if not isinstance(backbone, DiTConfig):
        return False
    return backbone.llama is not None and backbone.shifted and isinstance(model.objective, MDLM)
