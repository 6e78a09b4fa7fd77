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
    """An objective as a loss: for most, the nats of all tokens that are not prompt or padding."""

    objective: Objective

    def __call__(self, model: Any, batch: Any, generator: torch.Generator) -> LossSum:
        return with_aux_loss(model, self.objective.training_loss(model, batch, generator))


def with_aux_loss(model: Any, loss: LossSum) -> LossSum:
    """The loss of a call, with the auxiliary loss of the network, if it has one, added to its mean.

    It is logged as `aux_loss`. Each call's counts as often as the call has tokens, so that micro-batches and ranks add
    up to the mean over all tokens.
    """
    backbone = getattr(model, "backbone", None)
    aux_loss = None if backbone is None else backbone.aux_loss()
    if aux_loss is None:
        return loss
    weighted = loss.count * aux_loss
    return LossSum(loss.total + weighted, loss.count, {**loss.metrics, "aux_loss": weighted})
