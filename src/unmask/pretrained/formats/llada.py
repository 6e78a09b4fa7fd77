"""The published LLaDA format (as in `GSAI-ML/LLaDA-8B-Base`): Llama blocks with bidirectional attention.

iLLaDA has the same format, with shared keys and values, one matrix for embedding and head, and another mask.
"""

from __future__ import annotations

from unmask.pretrained.formats._llama import LOW_CONFIDENCE, ConfigKeys, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TensorNames

LLADA_FORMAT = LlamaFormat(
    "llada",
    TensorNames(
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
    ),
    ConfigKeys(
        width="d_model",
        depth="n_layers",
        heads="n_heads",
        kv_heads="n_kv_heads",
        intermediate_size="mlp_hidden_size",
        max_length="max_sequence_length",
        tie_embeddings="weight_tying",
        vocab="embedding_size",
        head_dim=None,
    ),
    required={
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
    },
    constants={
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "include_bias": False,
    },
    default_norm_eps=1e-5,
    mask_ids={126_464: 126_336, 155_136: 5},
    sampler=LOW_CONFIDENCE,
    chat_template="headers",
)
