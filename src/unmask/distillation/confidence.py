"""Confidence distillation (dParallel, arXiv 2509.26488): be sure at once of what is right.

    loss = sum over masked positions l of  w [ -log p_l(x_l) + beta 1(argmax p_l = x_l) H(p_l^(1/T)/Z) ]

with the weight w and the noise of the model's own objective: one term more than its bound, the entropy (at temperature
T) of the tokens that are predicted correctly. Samplers that write many tokens at once where the network is confident
(`threshold`, `factor`) then need fewer calls. The text should be the model's own: completions that the teacher wrote.

The published program has w = 1 and takes the means of both terms over the tokens that each has; it masks half of a
block of 32 tokens and all blocks after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.diffusion.denoiser import DenoiserLike
from unmask.distillation.base import Distillation
from unmask.objectives.base import LossSum, MaskedObjective, Objective, SteppedObjective, corrupt_batch
from unmask.training.hooks import Hook
from unmask.training.loss import LossFn, with_aux_loss
from unmask.types import Batch, LogX, Queries


@dataclass(frozen=True, kw_only=True)
class ConfidenceDistillation(Distillation):
    """The objective's loss, and the entropy of what is predicted correctly."""

    beta: float = 2.0
    """The weight of the entropy."""
    temperature: float = 0.5
    """T: below 1, tokens that are nearly certain count less."""

    def __post_init__(self) -> None:
        if self.beta < 0 or not self.temperature > 0:
            raise ValueError(
                f"beta must be 0 or above, and temperature above 0; got {self.beta} and {self.temperature}"
            )

    def refuse(self, teacher: DenoiserLike, objective: Objective) -> str | None:
        copies = not isinstance(objective, SteppedObjective) or objective.carry_over
        if isinstance(objective, MaskedObjective) and objective.normalized and copies:
            return None
        return (
            "confidence distillation is for masked diffusion whose probabilities sum to one and that copies visible"
            f" tokens (MDLM, block diffusion), and this teacher was trained by {type(objective).__name__}"
        )

    def build(self, student: nn.Module, objective: Objective, device: torch.device) -> tuple[LossFn, list[Hook]]:
        assert isinstance(objective, MaskedObjective)
        return ConfidenceLoss(self, objective), []

    def describe(self, steps: int) -> str:
        return f"confidence distillation, entropy times {self.beta:g} at temperature {self.temperature:g}"


@dataclass(frozen=True)
class ConfidenceLoss:
    """The loss of confidence distillation, in nats per token."""

    method: ConfidenceDistillation
    """The weight of the entropy, and its temperature."""
    objective: MaskedObjective
    """The loss to which it is added."""

    def __call__(self, model: DenoiserLike, batch: Batch, generator: torch.Generator) -> LossSum:
        batch, objective = batch.checked(model.vocab), self.objective
        host, device = batch.on_host, batch.tokens.device
        level, uniform = objective.sample_level(model, host, generator)
        z = corrupt_batch(objective.process, host, level.alpha, uniform, model.vocab)
        masked = Queries.from_host(((z == model.vocab.mask_id) & host.loss_mask).numpy(), device)
        level = level.to(device)
        x, weight = masked.gather(batch.tokens), masked.gather(level.weight)
        weighted_nll = objective.row_fn(x, level, masked)

        def row_fn(log_x: LogX, indices: slice | Tensor) -> Tensor:
            nll = weighted_nll(log_x, indices)
            is_correct = log_x.argmax(-1) == x[indices]
            return nll + weight[indices].to(nll) * self.method.beta * is_correct * self.entropy(log_x)

        nats = objective.query(model, batch, z.to(device), level.t, masked, row_fn)
        return with_aux_loss(model, LossSum(nats.sum(), batch.loss_mask.sum()))

    def entropy(self, log_x: LogX) -> Tensor:
        """The entropy [n] of log_x at the temperature."""
        scaled = (log_x / self.method.temperature).log_softmax(-1)
        return -(scaled.exp() * scaled.masked_fill(scaled == -torch.inf, 0)).sum(-1)
