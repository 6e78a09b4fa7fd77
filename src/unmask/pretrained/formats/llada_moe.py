"""The published format of LLaDA-MoE (as in `inclusionAI/LLaDA-MoE-7B-A1B-Instruct`): Llama blocks with experts.

Published configs have the type of the dense LLaDA, and are told from it by their architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unmask.backbones.moe import Experts
from unmask.pretrained._config_checks import ConfigReader
from unmask.pretrained.formats._llama import LOW_CONFIDENCE, TRANSFORMERS_KEYS, LlamaFormat
from unmask.pretrained.formats._llama_tensors import TRANSFORMERS_NAMES


@dataclass(frozen=True)
class _LLaDAExperts:
    """Weights are the softmax over all experts, at the chosen ones, and not made to sum to 1."""

    def read(self, reader: ConfigReader, depth: int) -> Experts:
        has_experts = reader.config.get("moe_layer_freq", [1] * depth)
        if not isinstance(has_experts, list) or len(has_experts) != depth:
            raise ValueError(
                f"{reader.where}: config.json's 'moe_layer_freq' needs an entry for each of {depth} layers"
            )
        shared = "shared_expert_intermediate_size"
        return Experts(
            reader.get_int("num_experts"),
            reader.get_int("num_experts_per_tok"),
            reader.get_int("expert_intermediate_size"),
            None if reader.config.get(shared) is None else reader.get_int(shared),
            dense_layers=tuple(layer for layer, has in enumerate(has_experts) if not has),
            balance_loss=reader.get_float("router_aux_loss_coef", 0.01),
        )

    def export(self, experts: Experts, depth: int) -> dict[str, Any]:
        if experts.scoring != "softmax" or experts.selection_bias or experts.groups > 1 or experts.z_loss:
            raise ValueError("a LLaDA-MoE chooses experts by softmax, without bias, groups and z_loss")
        if experts.normalize or experts.scale != 1:
            raise ValueError("a LLaDA-MoE weights experts by their softmax: train with normalize=false and scale=1")
        return {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "expert_intermediate_size": experts.intermediate_size,
            "shared_expert_intermediate_size": experts.shared_intermediate_size,
            "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(depth)],
            "router_aux_loss_coef": experts.balance_loss,
        }


LLADA_MOE_FORMAT = LlamaFormat(
    "lladamoe",
    replace(TRANSFORMERS_NAMES, kind="a LLaDA-MoE", shared_expert="shared_expert"),
    replace(
        TRANSFORMERS_KEYS,
        intermediate_size="dense_intermediate_size",
        head_dim=None,
        rotary_fraction="partial_rotary_factor",
    ),
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "qk_layernorm": True,
        "clip_qkv": None,
        "rope_scaling": None,
        "moe_router_enable_expert_bias": (False, None),
    },
    constants={
        "architectures": ["LLaDAMoEModelLM"],
        "hidden_act": "silu",
        "attention_bias": False,
        "qk_layernorm": True,
    },
    default_norm_eps=1e-5,
    qk_norm=True,
    mask_ids={None: 156_895},
    sampler=LOW_CONFIDENCE,
    experts=_LLaDAExperts(),
    architecture="LLaDAMoEModelLM",
    chat_template="roles",
)
