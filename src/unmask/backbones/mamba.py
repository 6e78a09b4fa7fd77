"""Mamba: a causal network of selective state spaces, to which a token costs the same however long the text is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unmask.backbones._recurrent_cache import RecurrentCache
from unmask.backbones._ssm import MambaBlock, MambaMixer, SSMBackbone, describe_blocks
from unmask.backbones.base import Capabilities
from unmask.backbones.state_space import SSMConfig
from unmask.ops.linear import Linear
from unmask.types import Vocab


@dataclass(frozen=True)
class MambaConfig(SSMConfig):
    """Sizes of a Mamba; `build(vocab)` makes it. The default is the network of the paper's DNA experiments."""

    causal = True

    def build(self, vocab: Vocab) -> Mamba:
        return Mamba(self, vocab)


class Mamba(SSMBackbone):
    """The network of `MambaConfig`; its head shares the matrix of the embedding."""

    def __init__(self, config: MambaConfig, vocab: Vocab) -> None:
        mixers = [MambaMixer(config, bidirectional=False) for _ in range(config.depth)]
        super().__init__(config, vocab, [MambaBlock(config, mixer) for mixer in mixers])
        self.config = config
        self.lm_head = Linear(config.width, vocab.size, bias=False)
        self.lm_head.weight = self.embedding.weight

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.config.max_length, causal=True, supports_documents=True, supports_cache=True)

    def describe(self) -> dict[str, Any]:
        return describe_blocks(self.config, "blocks of Mamba")

    def new_cache(self) -> RecurrentCache:
        return RecurrentCache()
