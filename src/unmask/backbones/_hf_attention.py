"""Attention masks and KV caches in the form that networks of the transformers library take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.backbones.attention_mask import AttentionLayout
from unmask.backbones.cache import KVCacheView

_GOLDEN_RATIO = (5**0.5 - 1) / 2
"""The fractional parts of its multiples fill [0, 1) evenly."""


def hf_attention_mask(
    context: AttentionLayout, future_visibility: float | None, model: Any
) -> Tensor | dict[str, Tensor]:
    """The attention mask [B or 1, 1, n, K], or one for each layer type if some layers have a sliding window.

    A converted causal network attends to the token d positions ahead if the fractional part of d * `_GOLDEN_RATIO` is
    below `future_visibility`. So it attends to about that fraction of the later tokens, independently of the text, and
    a larger value only adds tokens; 0 is causal attention, 1 bidirectional.
    """
    after = (context.key_positions[:, None] - context.query_positions[..., None])[:, None]
    seen = torch.ones_like(after, dtype=torch.bool)
    if context.mask is not None:
        seen = seen & context.mask
    if future_visibility is not None and future_visibility < 1:
        seen = seen & ((after <= 0) | (after * _GOLDEN_RATIO % 1 < future_visibility))
    config = model.config.get_text_config()
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of types {sorted(kinds)}; only full and sliding attention are supported"
        )
    if window is None or (kinds and "sliding_attention" not in kinds):
        return _to_hf(seen, context, model)
    near = after.abs() <= window if future_visibility is None else after.abs() < window  # as transformers counts
    if not kinds:
        return _to_hf(seen & near, context, model)
    return {
        "full_attention": _to_hf(seen, context, model),
        "sliding_attention": _to_hf(seen & near, context, model),
    }


def _to_hf(mask: Tensor, context: AttentionLayout, model: Any) -> Tensor:
    """The mask as the attention implementation takes it: booleans, or an additive bias. Every token attends to itself,
    so that no row of padding is empty."""
    itself = torch.arange(mask.shape[2], device=mask.device)
    mask = mask.clone()
    mask[:, :, itself, context.num_before + itself] = True
    if model.config._attn_implementation == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)


class HFCacheAdapter:
    """Our KV cache with the methods of transformers' caches that its networks call."""

    def __init__(self, cache: KVCacheView) -> None:
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values [B, heads, K, d] that a layer attends to, given the new ones."""
        return self.cache.update(layer, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        """The number of tokens read before."""
        return self.cache.start
