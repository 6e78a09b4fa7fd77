"""Who sees whom, as networks of the transformers library take it; and our keys and values as theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.backbones.attention_mask import AttentionLayout
from unmask.backbones.cache import KVCacheView

_GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, fill [0, 1) evenly."""


def hf_attention_mask(
    context: AttentionLayout, future_visibility: float | None, model: Any
) -> Tensor | dict[str, Tensor]:
    """Who sees whom [B or 1, 1, n, K], or one for each kind of layer if some have a window.

    A network that was causal is `future_visibility`: it sees what stands d places after it if the part of d * GOLDEN
    behind the point is below that number. So it sees about that share of what follows, the same whatever else
    is in the text, and nothing of it is lost when more is opened; 0 is the causal network, 1 an open one.
    """
    after = context.key_positions - context.query_positions[:, None]
    seen = torch.ones_like(after, dtype=torch.bool)[None, None]
    if context.mask is not None:
        seen = seen & context.mask
    if future_visibility is not None and future_visibility < 1:
        seen = seen & ((after <= 0) | (after * _GOLDEN_RATIO % 1 < future_visibility))
    config = model.config.get_text_config()
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{type(model).__name__} has layers {sorted(kinds)}: only attention can be opened")
    if window is None or (kinds and "sliding_attention" not in kinds):
        return _to_hf(seen, context, model)
    near = after.abs() <= window if future_visibility is None else after.abs() < window  # as the library counts them
    if not kinds:
        return _to_hf(seen & near, context, model)
    return {
        "full_attention": _to_hf(seen, context, model),
        "sliding_attention": _to_hf(seen & near, context, model),
    }


def _to_hf(mask: Tensor, context: AttentionLayout, model: Any) -> Tensor:
    """As the attention takes it: booleans, or what is added. Padding, which may see nothing else, sees
    itself."""
    itself = torch.arange(mask.shape[2], device=mask.device)
    mask = mask.clone()
    mask[:, :, itself, context.num_before + itself] = True
    if model.config._attn_implementation == "sdpa":
        return mask
    return torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)


class HFCacheAdapter:
    """A cache of ours as one of transformers, which asks it for nothing but keys and values."""

    def __init__(self, cache: KVCacheView) -> None:
        self.cache = cache

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All that a layer looks at [B, heads, K, d], given what is new."""
        return self.cache.update(layer, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        """How much was read before."""
        return self.cache.start
