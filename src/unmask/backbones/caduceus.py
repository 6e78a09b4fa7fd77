"""Caduceus: Mamba in both directions for DNA, with or without exact equivariance under the reverse complement.

A text of DNA and its reverse complement rc(x)_l = complement_ids[x_(L-1-l)] are the two strands of one molecule. The
equivariant network (Caduceus-PS) reads both strands and predicts from both, so that its prediction for rc(x) is
the reverse complement of that for x. The other (Caduceus-Ph) reads one strand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones._ssm import MambaBlock, MambaMixer, SequenceLayout, SSMBackbone, describe_blocks, select_rows
from unmask.backbones.base import Capabilities
from unmask.backbones.state_space import SSMConfig, require
from unmask.context import Context
from unmask.ops.linear import Linear, linear
from unmask.types import Positions, Times, Tokens, Vocab


@dataclass(frozen=True)
class CaduceusConfig(SSMConfig):
    """Sizes and options of a Caduceus; `build(vocab)` makes it. The default is that of the paper's DNA experiments."""

    width: int = 118
    """Width of the hidden states, of each strand."""
    strategy: str = "add"
    """How the outputs of both directions are combined: add or multiply."""
    equivariant: bool = False
    """Whether both strands are read with the same weights (Caduceus-PS), so that the prediction for the reverse
    complement of a text is the reverse complement of its prediction."""
    complement_ids: tuple[int, ...] = ()
    """The complement of each token id; most are their own. An equivariant network needs it."""
    exchanged_head: bool = False
    """Whether the head reads the strands in each other's place and their channels backwards, as in published
    equivariant networks with an odd number of blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.strategy in ("add", "multiply"), f"strategy must be add or multiply; got {self.strategy!r}")
        ids, size = self.complement_ids, len(self.complement_ids)
        require(
            all(0 <= i < size and ids[i] == token for token, i in enumerate(ids)),
            "complement_ids must give every token id another id, or itself, whose complement it is",
        )
        require(bool(ids) or not self.equivariant, "an equivariant network needs the complement of each token id")

    def build(self, vocab: Vocab) -> Caduceus:
        require(
            len(self.complement_ids) in (0, vocab.size),
            f"complement_ids has {len(self.complement_ids)} token ids, and the vocabulary {vocab.size}",
        )
        require(
            not self.complement_ids or self.complement_ids[vocab.mask_id] == vocab.mask_id,
            f"the complement of the mask, {vocab.mask_id}, must be the mask",
        )
        return Caduceus(self, vocab)


class Caduceus(SSMBackbone):
    """The network of `CaduceusConfig`; its head shares the matrix of the embedding.

    The hidden states of an equivariant network have twice its width: h(x)_l, then h(rc(x))_(L-1-l), which is what
    the other strand's token at the same place in the molecule is read as.
    """

    def __init__(self, config: CaduceusConfig, vocab: Vocab) -> None:
        multiply = config.strategy == "multiply"
        mixers = [MambaMixer(config, bidirectional=True, multiply=multiply) for _ in range(config.depth)]
        super().__init__(config, vocab, [MambaBlock(config, mixer) for mixer in mixers])
        self.config = config
        if config.equivariant:
            self.lm_head: nn.Linear = _StrandHead(self.embedding, config)
        else:
            self.lm_head = Linear(config.width, vocab.size, bias=False)
            self.lm_head.weight = self.embedding.weight

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.config.max_length, supports_documents=True)

    def describe(self) -> dict[str, Any]:
        return describe_blocks(self.config, f"blocks of Caduceus-{'PS' if self.config.equivariant else 'Ph'}")

    def embed(self, tokens: Tokens) -> Tensor:
        """The embeddings; those of an equivariant network are followed by the embeddings of the complements."""
        if not self.config.equivariant:
            return super().embed(tokens)
        complement = torch.tensor(self.config.complement_ids, device=tokens.device)
        return torch.cat([self.embedding(tokens), self.embedding(complement[tokens])], dim=-1)

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        if not self.config.equivariant:
            return super().encode(h, t, positions, context)
        layout = SequenceLayout.of(context, h, self._kernel_size)
        forward, reverse = h.chunk(2, dim=-1)
        x = self.run_blocks(torch.cat([forward, reverse.flip(1)]), layout.doubled())
        forward, reverse = x.view(2, *h.shape[:2], -1)
        strands = [select_rows(strand, positions) for strand in (forward, reverse.flip(1))]
        return torch.cat([self.norm(strand) for strand in strands], dim=-1)

    def features(self, h: Tensor, t: Times, context: Context = Context()) -> Tensor:
        """The mean of both strands: a text and its reverse complement then have the same mean over their tokens.

        Their channels are in the order in which published heads read them.
        """
        hidden = self.encode(h, t, None, context)
        if not self.config.equivariant:
            return hidden
        forward, reverse = hidden.chunk(2, dim=-1)
        mean = (forward + reverse) / 2
        return mean.flip(-1) if self.config.exchanged_head else mean


class _StrandHead(nn.Linear):
    """logits[v] = <E_v, h(x)> + <E_complement(v), h(rc(x))>: a linear layer whose weight is made of the embedding."""

    def __init__(self, embedding: nn.Embedding, config: CaduceusConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = 2 * embedding.embedding_dim, embedding.num_embeddings
        self.bias = None  # type: ignore[assignment]
        self._complement, self._exchanged = list(config.complement_ids), config.exchanged_head
        self._embedding = (embedding,)  # in a tuple: it is the backbone's module, and not this layer's

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[V, 2 width]."""
        matrix = self._embedding[0].weight
        strands = [matrix, matrix[self._complement]]
        return torch.cat([each.flip(1) for each in reversed(strands)] if self._exchanged else strands, dim=1)

    def forward(self, input: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., 2 width]."""
        return linear(input, self.weight, None)
