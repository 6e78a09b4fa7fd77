"""What a trainer minimizes: any function of a model and a batch that returns a sum and a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.objectives.base import Objective


@dataclass(frozen=True)
class LossSum:
    """The loss of some rows of a global batch, as a sum: sums of all micro-batches and ranks add up.

    The trainer minimizes (sum of totals)/(sum of counts).
    """

    total: Tensor
    """The summed loss, a scalar with a gradient."""
    count: Tensor | float
    """What the sum is over: tokens, examples."""
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Further sums by name, the same names in every call; logged as (sum over the global batch)/(sum of counts)."""

    def stack(self, device: torch.device) -> Tensor:
        """[total, count, *metrics] in float64, without gradient: what is summed over micro-batches and ranks."""
        values = (self.total, self.count, *self.metrics.values())
        return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values])


class LossFn(Protocol):
    """A loss.

    `generator` is a CPU generator in the same state for every micro-batch and rank of a step: noise drawn with
    it and the rows' global indices does not depend on how the global batch is split.
    """

    def __call__(self, model: Any, batch: Any, generator: torch.Generator) -> LossSum:
        """The loss of the batch's rows."""
        ...


@dataclass(frozen=True)
class DenoisingLoss:
    """A diffusion (or next-token) objective as a loss: the nats of all tokens that are not prompt or padding.

    An auxiliary loss of the network is added to the nats per token, and logged as `aux_loss`. Each call's counts as
    often as it has tokens, so that micro-batches and ranks add up to the mean over all tokens.
    """

    objective: Objective

    def __call__(self, model: Any, batch: Any, generator: torch.Generator) -> LossSum:
        nll, count = self.objective.token_nll(model, batch, generator).sum(), batch.loss_mask.sum()
        backbone = getattr(model, "backbone", None)
        aux_loss = None if backbone is None else backbone.aux_loss()
        if aux_loss is None:
            return LossSum(nll, count)
        return LossSum(nll + count * aux_loss, count, {"aux_loss": count * aux_loss})
