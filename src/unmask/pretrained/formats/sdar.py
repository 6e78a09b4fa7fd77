"""The published format of SDAR and TraDo (as in `JetLM/SDAR-4B-Chat`): Qwen3 with block-causal attention."""

from __future__ import annotations

from unmask.pretrained.formats._llama import TRANSFORMERS_KEYS, Blocks, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES, named
from unmask.sampling import Blockwise, Threshold

SDAR_FORMAT = LlamaFormat(
    "sdar",
    named(TRANSFORMERS_NAMES, "an SDAR"),
    TRANSFORMERS_KEYS,
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": (False, None),
    },
    constants={"architectures": ["SDARForCausalLM"], "hidden_act": "silu", "attention_bias": False},
    default_norm_eps=1e-6,
    qk_norm=True,
    mask_ids={None: 151_669},
    blocks=Blocks(4),
    sampler=Blockwise(sampler=Threshold(0.85)),
    chat_template="chatml",
)
