"""The published formats of dllm's A2D (as in `dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1`): causal models, opened.

Their tensors and configs are those of the models that they began as. Nothing in a config says whether attention is
full (`mdlm`) or block-causal (`bd3lm`): the name of the repository does, or a `block_size` in the config, which is what
is written here.
"""

from __future__ import annotations

from unmask.pretrained.formats._llama import LOW_CONFIDENCE, TRANSFORMERS_KEYS, Blocks, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES, named

_REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": (False, None)}
_BLOCKS = Blocks(32, name_part="bd3lm", from_prompt=True)


def _a2d(kind: str, *, qk_norm: bool = False, qkv_bias: bool = False, norm_eps: float = 1e-6) -> LlamaFormat:
    return LlamaFormat(
        f"a2d-{kind.lower()}",
        named(TRANSFORMERS_NAMES, f"an A2D of {kind}"),
        TRANSFORMERS_KEYS,
        required=_REQUIRED,
        constants={"architectures": [f"A2D{kind}LMHeadModel"], "hidden_act": "silu"},
        default_norm_eps=norm_eps,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        blocks=_BLOCKS,
        sampler=LOW_CONFIDENCE,
        chat_template="headers" if kind == "Llama" else "chatml",
    )


A2D_QWEN3_FORMAT = _a2d("Qwen3", qk_norm=True)
A2D_QWEN2_FORMAT = _a2d("Qwen2", qkv_bias=True)
A2D_LLAMA_FORMAT = _a2d("Llama", norm_eps=1e-5)
