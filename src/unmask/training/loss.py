"""What a trainer minimizes: any function of a model and a batch that returns a sum and a count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unmask.objectives.base import LossSum as LossSum
from unmask.objectives.base import Objective


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
    """An objective as a loss: for most, the nats of all tokens that are not prompt or padding.

    An auxiliary loss of the network is added to the nats per token, and logged as `aux_loss`. Each call's counts as
    often as it has tokens, so that micro-batches and ranks add up to the mean over all tokens.
    """

    objective: Objective

    def __call__(self, model: Any, batch: Any, generator: torch.Generator) -> LossSum:
        loss = self.objective.training_loss(model, batch, generator)
        backbone = getattr(model, "backbone", None)
        aux_loss = None if backbone is None else backbone.aux_loss()
        if aux_loss is None:
            return loss
        weighted = loss.count * aux_loss
        return LossSum(loss.total + weighted, loss.count, {**loss.metrics, "aux_loss": weighted})
