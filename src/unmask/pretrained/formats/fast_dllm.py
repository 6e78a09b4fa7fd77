"""The published format of Fast-dLLM v2 (as in `Efficient-Large-Model/Fast_dLLM_v2_7B`): Qwen2.5, block-causal.

Its logits are still shifted: the first token of a block is predicted by the last of the block before, read clean.
"""

from __future__ import annotations

from unmask.pretrained.formats._llama import GREEDY, TRANSFORMERS_KEYS, Blocks, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES, named
from unmask.sampling import Blockwise, Threshold

FAST_DLLM_FORMAT = LlamaFormat(
    "Fast_dLLM_Qwen",
    named(TRANSFORMERS_NAMES, "a Fast-dLLM v2"),
    TRANSFORMERS_KEYS,
    required={"hidden_act": "silu", "use_sliding_window": (False, None)},
    constants={"architectures": ["Fast_dLLM_QwenForCausalLM"], "hidden_act": "silu"},
    default_norm_eps=1e-6,
    qkv_bias=True,
    shift_logits=True,
    mask_ids={None: 151_665},
    blocks=Blocks(32, key="bd_size"),
    sampler=Blockwise(sampler=Threshold(1.0, GREEDY), sub_block_size=8),
    chat_template="chatml",
)
