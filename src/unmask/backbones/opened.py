"""Who sees whom, as networks of the transformers library take it; and our keys and values as theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unmask.backbones.masks import Beside, Sight

GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, fill [0, 1) evenly."""


def masks(view: Sight, opened: float | None, network: Any) -> Tensor | dict[str, Tensor]:
    """Who sees whom [B or 1, 1, n, K], or one for each kind of layer if some have a window.

    A network that was causal is `opened`: it sees what stands d places after it if the part of d * GOLDEN
    behind the point is below that number. So it sees about that share of what follows, the same whatever else
    is in the text, and nothing of it is lost when more is opened; 0 is the causal network, 1 an open one.
    """
    after = view.key_place - view.query_place[:, None]
    seen = torch.ones_like(after, dtype=torch.bool)[None, None]
    if view.seen is not None:
        seen = seen & view.seen
    if opened is not None and opened < 1:
        seen = seen & ((after <= 0) | (after * GOLDEN % 1 < opened))
    config = network.config.get_text_config()
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{type(network).__name__} has layers {sorted(kinds)}: only attention can be opened")
    if window is None or (kinds and "sliding_attention" not in kinds):
        return _spoken(seen, view, network)
    near = after.abs() <= window if opened is None else after.abs() < window  # as the library counts them
    if not kinds:
        return _spoken(seen & near, view, network)
    return {
        "full_attention": _spoken(seen, view, network),
        "sliding_attention": _spoken(seen & near, view, network),
    }


def _spoken(seen: Tensor, view: Sight, network: Any) -> Tensor:
    """As the attention takes it: booleans, or what is added. Padding, which may see nothing else, sees
    itself."""
    first = int((view.key_place == view.query_place[0]).int().argmax())
    itself = torch.arange(seen.shape[2], device=seen.device)
    seen = seen.clone()
    seen[:, :, itself, first + itself] = True
    if network.config._attn_implementation == "sdpa":
        return seen
    return torch.zeros_like(seen, dtype=network.dtype).masked_fill(~seen, torch.finfo(network.dtype).min)


class Held:
    """A cache of ours as one of transformers, which asks it for nothing but keys and values."""

    def __init__(self, beside: Beside) -> None:
        self.beside = beside

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All that a layer looks at [B, heads, K, d], given what is new."""
        return self.beside.layer(layer, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        """How much was read before."""
        return self.beside.start
