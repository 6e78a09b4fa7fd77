"""What happens around the steps of a trainer: curricula, attention annealing, or anything of yours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from unmask.training.trainer import Trainer


class Hook:
    """Called before and after every step; override what you need. What it remembers goes into checkpoints."""

    def before_step(self, trainer: Trainer) -> None:
        """Before the batch of step `trainer.state.step` is read: may change the loss or the model."""

    def after_step(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After the step, which `trainer.state.step` counts already; what is added to `metrics` is logged.

        Setting `trainer.state.ended_early` on all ranks makes it the last step of the run.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint must hold, by name; they are read back in place."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What else a checkpoint must hold, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""


class AttentionAnnealing(Hook):
    """A causal pretrained backbone becomes bidirectional, linearly over the first `fraction` of the run."""

    def __init__(self, backbone: Any, fraction: float) -> None:
        if getattr(backbone, "future_visibility", None) is None:
            raise ValueError(
                "attention_annealing needs a causal pretrained backbone; this one is already bidirectional"
            )
        self.backbone, self.fraction = backbone, fraction

    def before_step(self, trainer: Trainer) -> None:
        self.backbone.future_visibility = min(1.0, trainer.progress / self.fraction)
