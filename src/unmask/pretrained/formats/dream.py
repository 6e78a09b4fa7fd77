"""The published Dream format (as in `Dream-org/Dream-v0-Base-7B`): Qwen2 with bidirectional attention.

It was initialized from an autoregressive model, and its logits are still shifted by one position.
"""

from __future__ import annotations

from unmask.pretrained.formats._llama import ConfigKeys, LlamaFormat, TensorNames

DREAM_FORMAT = LlamaFormat(
    "Dream",
    TensorNames(
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
    ),
    ConfigKeys(
        width="hidden_size",
        depth="num_hidden_layers",
        heads="num_attention_heads",
        kv_heads="num_key_value_heads",
        intermediate_size="intermediate_size",
        max_length="max_position_embeddings",
        tie_embeddings="tie_word_embeddings",
    ),
    required={
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_scaling": None,
        "attention_dropout": (0, 0.0),
    },
    constants={"architectures": ["DreamModel"], "hidden_act": "silu"},
    default_norm_eps=1e-6,
    qkv_bias=True,
    shift_logits=True,
)
