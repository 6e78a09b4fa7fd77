"""An experiment is everything that decides a model: text, tokenizer, network, objective, training.

`unmask.run.run_experiment` carries it out in a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from unmask.backbones import BackboneConfig
from unmask.backbones.dit import DiTConfig
from unmask.config import to_json
from unmask.data.corpus import PrepareConfig
from unmask.data.loader import RowLayout, Wrapped
from unmask.distillation import Distillation
from unmask.model import LanguageModel
from unmask.objectives import MDLM, NextToken, Objective
from unmask.objectives.base import MaskedObjective
from unmask.training.config import TrainingConfig
from unmask.training.curriculum import require_masked
from unmask.training.lora import LoRA

MAY_CHANGE_ON_RESUME = (
    "microbatch_size",
    "parallelism",
    "log_every",
    "save_every",
    "eval_every",
    "keep_checkpoints",
    "max_nonfinite_steps",
    "compile",
    "trackers",
)
"""Settings of training that a resumed run may change: the weights do not depend on them."""


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a model."""

    sources: tuple[str, ...] = ("stdlib",)
    """Files, folders or data sets to learn, as `unmask prepare` takes them."""
    tokenizer: str = "bpe:4096"
    """The tokenizer, as `unmask prepare` takes it."""
    backbone: BackboneConfig = DiTConfig()
    """The network."""
    objective: Objective = MDLM()
    """The loss, and with it the diffusion process."""
    training: TrainingConfig = TrainingConfig()
    """How long and how to train."""
    layout: RowLayout = Wrapped()
    """How documents become rows of a batch."""
    prepare: PrepareConfig = PrepareConfig()
    """How sources become a corpus."""
    eval_windows: int = 64
    """Held-out rows that are scored during training."""
    unigram_bias_init: bool = False
    """Start from predicting each token as often as it occurs, which the network would have to learn first."""
    init_from: str | None = None
    """A model to start from, as `unmask.load` takes it; its network and tokenizer replace `backbone`, `tokenizer`."""
    lora: LoRA | None = None
    """Train only LoRA adapters of the model to start from."""
    distillation: Distillation | None = None
    """Learn from the model to start from, as a teacher, to sample in fewer steps; None: learn from the text."""

    def __post_init__(self) -> None:
        if self.init_from is None:
            self._check_new_model()
        if self.eval_windows < 1:
            raise ValueError(f"eval_windows must be at least 1; got {self.eval_windows}")
        if self.init_from is not None and self.unigram_bias_init:
            raise ValueError("unigram_bias_init is for new models; leave it out with init_from")
        if self.training.curriculum is not None:
            require_masked(self.objective)
        if self.distillation is not None:
            self._check_distillation(self.distillation)

    def _check_distillation(self, distillation: Distillation) -> None:
        if self.init_from is None:
            raise ValueError("distillation needs a teacher: name it as init_from")
        for name in ("curriculum", "attention_annealing"):
            if getattr(self.training, name) is not None:
                raise ValueError(f"{name} is for learning from text; leave it out with distillation")
        distillation.check_steps(self.training.steps)

    def _check_new_model(self) -> None:
        if self.backbone.needs_weights:
            raise ValueError("a network of another library comes with its weights: name its folder as init_from")
        if self.lora is not None:
            raise ValueError("lora is for fine-tuning: name the model to start from as init_from")
        longest = self.longest_row
        if longest is not None and self.layout.length > longest:
            raise ValueError(f"rows of {self.layout.length} tokens are longer than the model's maximum of {longest}")
        causal = isinstance(self.objective, NextToken)
        if self.backbone.causal != causal:
            raise ValueError(
                f"{type(self.objective).__name__} needs backbone.causal={str(causal).lower()};"
                " set it, or use `with_objective` or --objective, which set it"
            )

    @property
    def longest_row(self) -> int | None:
        """The longest text that the network takes; None if there is no limit."""
        longest = self.backbone.max_length
        return None if longest is None else longest - self.objective.end_marks

    def with_objective(self, objective: Objective) -> Experiment:
        """The same with another objective, the attention that it needs, and rows that it can take.

        An autoregressive network attends backwards only, so it has no local init at both neighbours; an objective
        without times has no curriculum of them.
        """
        causal, backbone = isinstance(objective, NextToken), self.backbone
        has_times = isinstance(objective, MaskedObjective)
        training = self.training if has_times else replace(self.training, curriculum=None)
        if self.init_from is None:
            backbone = backbone.with_causal(causal)
        shorter = max(0, objective.end_marks - self.objective.end_marks)  # texts have end marks in their rows
        layout = self.layout.with_length(self.layout.length - shorter) if shorter else self.layout
        return replace(self, objective=objective, backbone=backbone, training=training, layout=layout)

    def with_init_from(self, init_from: str, lm: LanguageModel) -> Experiment:
        """The same, starting from the model `lm` that `init_from` names: with its network, tokenizer and objective,
        and rows that it can take."""
        longest = lm.denoiser.max_length
        length = self.layout.length if longest is None else min(self.layout.length, longest)
        return replace(
            self,
            init_from=init_from,
            tokenizer=f"that of {init_from}",
            backbone=lm.denoiser.config.backbone,
            objective=lm.objective,
            layout=self.layout.with_length(length),
            unigram_bias_init=False,
        )

    def fixed_settings(self) -> dict[str, Any]:
        """As JSON, all settings that weights depend on: those that a resumed run may not change, and its steps."""
        settings: dict[str, Any] = to_json(self)
        for name in MAY_CHANGE_ON_RESUME:
            settings["training"].pop(name)
        return settings
