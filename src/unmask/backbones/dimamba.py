"""DiMamba: Mamba in both directions, modulated by the time (adaLN), as in the code of the MDLM paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.backbones._ssm import (
    MambaBlock,
    MambaMixer,
    SequenceLayout,
    SSMBackbone,
    describe_blocks,
    select_rows,
    zero_linear,
)
from unmask.backbones.base import Capabilities
from unmask.backbones.dit import TimeConditioning
from unmask.backbones.layers import TimeEmbedding
from unmask.backbones.state_space import SSMConfig, require
from unmask.context import Context
from unmask.ops.linear import Linear
from unmask.types import Positions, Times, Vocab


@dataclass(frozen=True)
class DiMambaConfig(SSMConfig):
    """Sizes and options of a DiMamba; `build(vocab)` makes it. The default is the published `tiny-dimamba`."""

    width: int = 512
    """Width of the hidden states."""
    depth: int = 14
    """Number of blocks."""
    dropout: float = 0.1
    """Dropout of the output of each block."""
    tie_embeddings: bool = False
    """Whether the head shares the matrix of the embedding."""
    time_conditioning: TimeConditioning = TimeConditioning()
    """How the network is told the time."""
    ignore_time: bool = False
    """Whether the network is always told the time 0, as published networks without time conditioning are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.dropout < 1, f"dropout must be in [0, 1); got {self.dropout}")

    def build(self, vocab: Vocab) -> DiMamba:
        return DiMamba(self, vocab)


class DiMamba(SSMBackbone):
    """The network of `DiMambaConfig`. Shifts, scales and gates start at zero, so a new network ignores its blocks."""

    def __init__(self, config: DiMambaConfig, vocab: Vocab) -> None:
        timed = config.time_conditioning
        mixers = [MambaMixer(config, bidirectional=True) for _ in range(config.depth)]
        super().__init__(config, vocab, [MambaBlock(config, mixer, timed.width, config.dropout) for mixer in mixers])
        self.config = config
        self.time_embedding = TimeEmbedding(timed.width, timed.scale)
        self.modulation = zero_linear(timed.width, 2 * config.width)
        self.lm_head = Linear(config.width, vocab.size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    @property
    def capabilities(self) -> Capabilities:
        config = self.config
        return Capabilities(config.max_length, time_conditioned=not config.ignore_time, supports_documents=True)

    def describe(self) -> dict[str, Any]:
        return describe_blocks(self.config, "blocks of DiMamba")

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        layout = SequenceLayout.of(context, h, self._kernel_size)
        time_emb = self.time_embedding(torch.zeros_like(t) if self.config.ignore_time else t)
        x = select_rows(self.run_blocks(h, layout, time_emb), positions)
        if positions is not None:
            time_emb = select_rows(time_emb.expand(*h.shape[:2], -1), positions)
        shift, scale = self.modulation(time_emb).chunk(2, dim=-1)
        hidden: Tensor = self.norm(x) * (1 + scale) + shift
        return hidden
