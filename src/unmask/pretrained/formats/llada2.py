"""The published format of LLaDA2.0 and 2.1 (as in `inclusionAI/LLaDA2.0-mini`): block-causal, with experts.

Both have the same network and the same config; 2.1, which is known by the name of its folder, also edits what it wrote
(`JointThreshold`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unmask.backbones.moe import Experts
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._llama import GREEDY, TRANSFORMERS_KEYS, Blocks, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TensorNames
from unmask.sampling import Blockwise, JointThreshold, Threshold


@dataclass(frozen=True)
class _LLaDA2Experts:
    """Sigmoid scores; experts are chosen with a bias and in groups, and their weights sum to a factor."""

    def read(self, reader: ConfigReader, depth: int) -> Experts:
        size, shared = reader.get_int("moe_intermediate_size"), reader.config.get("num_shared_experts")
        groups = reader.get_int("n_group", 1)
        return Experts(
            reader.get_int("num_experts"),
            reader.get_int("num_experts_per_tok"),
            size,
            size * reader.get_int("num_shared_experts") if shared else None,
            scoring="sigmoid",
            normalize=True,
            scale=reader.get_float("routed_scaling_factor", 1.0),
            selection_bias=reader.get_bool("moe_router_enable_expert_bias", True),
            groups=groups,
            groups_per_token=reader.get_int("topk_group", groups),
            dense_layers=tuple(range(min(depth, int(reader.get_float("first_k_dense_replace", 0))))),
            balance_loss=reader.get_float("router_aux_loss_coef", 0.0),
        )

    def export(self, experts: Experts, depth: int) -> dict[str, Any]:
        shared = experts.shared_intermediate_size or 0
        first_dense = len(experts.dense_layers)
        wrong = (
            experts.scoring != "sigmoid"
            or not experts.normalize
            or experts.z_loss
            or shared % experts.intermediate_size
            or experts.dense_layers != tuple(range(first_dense))
        )
        if wrong:
            raise ValueError(
                "a LLaDA2 has scoring=sigmoid, normalize=true, z_loss=0, a shared expert that is as wide as one or"
                " several others, and dense_layers that come first; this mixture of experts differs"
            )
        return {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.intermediate_size,
            "num_shared_experts": shared // experts.intermediate_size,
            "routed_scaling_factor": experts.scale,
            "moe_router_enable_expert_bias": experts.selection_bias,
            "n_group": experts.groups,
            "topk_group": experts.groups_per_token,
            "first_k_dense_replace": first_dense,
            "router_aux_loss_coef": experts.balance_loss,
        }


LLADA2_FORMAT = LlamaFormat(
    "llada2_moe",
    TensorNames(
        kind="a LLaDA2",
        embedding="model.word_embeddings",
        norm="model.norm",
        output="lm_head",
        block="model.layers.{}",
        norm1="input_layernorm",
        norm2="post_attention_layernorm",
        qkv="attention.query_key_value",
        out="attention.dense",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
        query_norm="attention.query_layernorm",
        key_norm="attention.key_layernorm",
    ),
    replace(TRANSFORMERS_KEYS, rotary_fraction="partial_rotary_factor"),
    required={
        "hidden_act": "silu",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "rope_scaling": None,
        "use_sliding_window": (False, None),
    },
    constants={
        "architectures": ["LLaDA2MoeModelLM"],
        "hidden_act": "silu",
        "use_bias": False,
        "use_qkv_bias": False,
        "score_function": "sigmoid",
        "norm_topk_prob": True,
    },
    default_norm_eps=1e-6,
    qk_norm=True,
    mask_ids={None: 156_895},
    blocks=Blocks(32),
    sampler=Blockwise(sampler=Threshold(0.95, GREEDY)),
    named_samplers={"llada2.1": Blockwise(sampler=JointThreshold(0.95, 0.9, 16, GREEDY))},
    experts=_LLaDA2Experts(),
    chat_template="roles",
)
