"""The published Dream format (as in `Dream-org/Dream-v0-Base-7B`): Qwen2 with bidirectional attention.

It was initialized from an autoregressive model, and its logits are still shifted by one position.
"""

from __future__ import annotations

from unmask.pretrained.formats._llama import TRANSFORMERS_KEYS, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES, named

DREAM_FORMAT = LlamaFormat(
    "Dream",
    named(TRANSFORMERS_NAMES, "a Dream"),
    TRANSFORMERS_KEYS,
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
    chat_template="chatml",
)
