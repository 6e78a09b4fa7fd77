"""What training costs on any machine: FLOPs of a step, and from these the time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unmask.backbones.base import BackboneConfig, BlockStackConfig
from unmask.backbones.dit import DiTConfig
from unmask.types import Vocab

MASKED_FRACTION = 0.5
"""The fraction of tokens that reach the head: times are uniform, so half of them on average."""


@dataclass(frozen=True)
class ModelShape:
    """A DiT without time conditioning."""

    name: str
    depth: int
    width: int
    vocab: int = 50_258
    length: int = 1024

    @property
    def block_parameters(self) -> int:
        """4 width² in attention and 8 width² in the MLP."""
        return 12 * self.depth * self.width**2

    @property
    def parameters(self) -> int:
        """All blocks, the embedding and the (untied) head."""
        return self.block_parameters + 2 * self.vocab * self.width

    @property
    def flops_per_token(self) -> float:
        """Forward once, backward twice: 6 a parameter, 12 L width a layer for attention, the head on a half.

        The last layer's queries and MLP are computed at the masked half only.
        """
        layer = 6 * 12 * self.width**2
        spared = (1 - MASKED_FRACTION) * layer * 10 / 12
        attention = 12 * self.depth * self.length * self.width
        head = 6 * MASKED_FRACTION * self.vocab * self.width
        return self.depth * layer - spared + attention + head

    @property
    def activation_bytes_per_token(self) -> float:
        """What autograd keeps in bfloat16 with float32 residuals: 28 width a layer, and the embedding."""
        return (28 * self.depth + 8) * self.width


def flops_per_token(backbone: BackboneConfig, vocab: int, length: int) -> float:
    """FLOPs of a training step per token: a DiT's in detail, of other networks 6 a parameter of their blocks.

    Attention over rows comes on top where there is any; a state-space network has none, and its scan is not counted,
    which is a tenth of its matrix products.
    """
    if isinstance(backbone, DiTConfig):
        return ModelShape("DiT", backbone.depth, backbone.width, vocab, length).flops_per_token
    with torch.device("meta"):
        network = backbone.build(Vocab(vocab, vocab - 1))
    blocks = sum(each.numel() for block in network.blocks() for each in block.parameters())
    assert isinstance(backbone, BlockStackConfig)
    attention = 12 * backbone.depth * length * backbone.width if network.capabilities.supports_stages else 0
    return 6 * blocks + attention + 6 * MASKED_FRACTION * vocab * backbone.width


@dataclass(frozen=True)
class Cluster:
    """Many equal devices: FLOP/s that matrix products reach, bytes/s between them, bytes of memory."""

    name: str
    flops: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    gpus_per_node: int
    memory_bytes: float

    def bandwidth(self, ranks: int) -> float:
        """The bandwidth of the slowest link between the ranks."""
        return self.intra_node_bandwidth if ranks <= self.gpus_per_node else self.inter_node_bandwidth


H100 = Cluster(
    "H100",
    flops=0.4 * 989e12,
    intra_node_bandwidth=450e9,
    inter_node_bandwidth=50e9,
    gpus_per_node=8,
    memory_bytes=80e9,
)
"""40 % of the bfloat16 peak, NVLink within a node of 8, 400 Gbit/s a GPU between nodes."""
