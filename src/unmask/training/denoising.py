"""The trainer of a denoiser: an objective as the loss, with the hooks that its config names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.distributed import Distributed
from unmask.objectives.base import Objective
from unmask.training._batches import BatchSource, CheckedBatches, RandomLength
from unmask.training.config import TrainingConfig
from unmask.training.hooks import AttentionAnnealing, Hook
from unmask.training.loss import DenoisingLoss, LossFn
from unmask.training.trainer import Trainer


def build_denoising_trainer(
    denoiser: Any,
    objective: Objective,
    batches: BatchSource,
    config: TrainingConfig,
    distributed: Distributed = Distributed(),  # noqa: B008
    *,
    loss_fn: LossFn | None = None,
    hooks: Sequence[Hook] = (),
) -> Trainer:
    """A trainer with the config's curriculum, attention annealing and random lengths.

    `loss_fn`: what is minimized instead of the objective. `hooks`: further ones, which come first.
    """
    batches, hooks = CheckedBatches(batches, denoiser.vocab), list(hooks)
    if config.curriculum is not None:
        hooks.append(config.curriculum.build_hook(objective, batches))
    if config.attention_annealing is not None:
        hooks.append(AttentionAnnealing(denoiser.backbone, config.attention_annealing))
    hooks += denoiser.training_hooks()
    if config.random_length_prob:
        batches = RandomLength(batches, config.random_length_prob, config.seed)
    return Trainer(denoiser, loss_fn or DenoisingLoss(objective), batches, config, hooks, distributed=distributed)
