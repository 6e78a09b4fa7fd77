"""Token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """`nn.Embedding` whose table may be stored in fewer bits than its vectors have."""

    output_dtype: torch.dtype | None = None
    """The type of the vectors; None for that of the table."""

    def forward(self, input: Tensor) -> Tensor:
        """The rows of the table."""
        rows: Tensor = super().forward(input)
        return rows if self.output_dtype is None else rows.to(self.output_dtype)
