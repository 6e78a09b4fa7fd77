"""The network of SSD-LM: a backbone with another input at noisy positions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unmask.baselines._denoiser import ContinuousDenoiser, embedding_matrix
from unmask.baselines._simplex import SimplexState
from unmask.context import Context
from unmask.model.denoiser import ModelConfig
from unmask.types import Positions, Queries, RowFn, Times


class SSDLMDenoiser(ContinuousDenoiser):
    """log_x of a noisy block: a token of the context is read through the backbone's embedding, a noisy position as

        M softmax(a_t) + t p + q

    with a matrix M that starts as the embedding, and vectors p, q that start at zero.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_sum_layer = nn.Linear(config.vocab.size, self.embedding_width, bias=False)
        self.timestep_layer = nn.Linear(1, self.embedding_width)
        self._init_inputs()

    @torch.no_grad()
    def _init_inputs(self) -> None:
        self.embed_sum_layer.weight.copy_(embedding_matrix(self.backbone, self.vocab.size).T)
        nn.init.zeros_(self.timestep_layer.weight)
        nn.init.zeros_(self.timestep_layer.bias)

    def load_initial(self, other: Any) -> None:
        super().load_initial(other)
        if type(other) is not type(self):
            self._init_inputs()

    def forward(
        self,
        z: Any,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        """log_x [N, V] at the queried positions of a `SimplexState` with times t [B, 1], or `row_fn` of its rows."""
        if self.max_length is not None and z.shape[1] > self.max_length:
            raise ValueError(f"a sequence of {z.shape[1]} tokens is longer than the model's {self.max_length}")
        self.backbone.require(context)
        queries, order = Queries.resolve(positions, z.shape)
        with torch.autocast(z.tokens.device.type, torch.bfloat16) if self.use_bf16 else nullcontext():
            hidden = self.backbone.encode(self._embed(z, t), t, queries, context)
        if order is not None:
            hidden = hidden[order]
        return self._read(hidden, torch.zeros_like(hidden[:, :1]), row_fn)

    def _embed(self, z: SimplexState, t: Float[Tensor, "B 1"]) -> Float[Tensor, "B L width"]:
        before = self.backbone.embed(z.tokens)
        weight = self.embed_sum_layer.weight
        noisy = self.embed_sum_layer(z.block.softmax(-1).to(weight)) + self.timestep_layer(t.to(weight))[:, None]
        return torch.cat([before, noisy.to(before)], 1)
