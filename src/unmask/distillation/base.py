"""What all distillations share: a loss in place of the objective's, and a teacher that is replaced by rounds.

The student starts as a copy of the model to start from. In round k = 0, 1, ... it learns to reach in one call what its
teacher reaches in several steps of size 2^k/N. After each round the student, as it is then, becomes the teacher, and
steps are twice as large; the optimizer goes on. The teacher's weights are part of every checkpoint.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Process
from unmask.objectives.base import LossSum, Objective
from unmask.training.ema import trainable_parameters
from unmask.training.hooks import Hook
from unmask.training.loss import LossFn, with_aux_loss
from unmask.training.trainer import Trainer
from unmask.types import Batch, LogX, Positions, Times, Tokens


class Distillation(ABC):
    """How a student learns from its teacher, the model that it starts from; subclasses are frozen dataclasses."""

    @abstractmethod
    def refuse(self, teacher: DenoiserLike, objective: Objective) -> str | None:
        """Why this teacher, which was trained with `objective`, cannot be distilled, as a sentence; None if it can."""

    @abstractmethod
    def build(self, student: nn.Module, objective: Objective, device: torch.device) -> tuple[LossFn, list[Hook]]:
        """The loss of the student, which still has its teacher's weights, and what happens around its steps."""

    @abstractmethod
    def describe(self, steps: int) -> str:
        """What was done in `steps` training steps, for cards."""

    def check_steps(self, steps: int) -> None:
        """ValueError for a number of training steps that makes no sense."""
        return


@dataclass(frozen=True, kw_only=True)
class RoundDistillation(Distillation):
    """A distillation whose teacher is replaced by the student after each round."""

    processes: ClassVar[tuple[type[Process], ...]]
    """The processes of the models that it is for."""

    steps_per_round: int = 10_000
    """Training steps of a round."""
    sampling_steps: int
    """N, the steps in which the first teacher samples; each round halves them."""
    teacher_average: bool = False
    """Whether the next teacher is the moving average of the student's weights instead of these weights."""
    forward_kl: bool = False
    """Minimize KL(teacher || student), which covers all that the teacher says, instead of KL(student || teacher)."""

    def __post_init__(self) -> None:
        if self.steps_per_round < 1 or self.sampling_steps < self._steps_at_once:
            raise ValueError(
                f"steps_per_round must be at least 1, and sampling_steps at least {self._steps_at_once};"
                f" got {self.steps_per_round} and {self.sampling_steps}"
            )

    @property
    def _steps_at_once(self) -> int:
        """Steps of the teacher that the student takes at once."""
        return 1

    @property
    def max_rounds(self) -> int:
        """The rounds after which a student's step would be longer than a whole text takes."""
        return int(math.log2(self.sampling_steps / self._steps_at_once) + 1e-9) + 1

    def rounds(self, steps: int) -> int:
        """The rounds that there are in `steps` training steps."""
        return -(-steps // self.steps_per_round)

    def step_size(self, number: int) -> float:
        """The size of a teacher's step in round `number`, from 0."""
        return math.ldexp(1, number) / self.sampling_steps

    def check_steps(self, steps: int) -> None:
        if self.rounds(steps) > self.max_rounds:
            raise ValueError(
                f"from a teacher of {self.sampling_steps} steps there are at most {self.max_rounds} rounds, after which"
                f" a text takes one step; {steps:,} training steps in rounds of {self.steps_per_round:,} are"
                f" {self.rounds(steps):,}: take fewer, or more sampling_steps"
            )

    def refuse(self, teacher: DenoiserLike, objective: Objective) -> str | None:
        if isinstance(teacher.process, self.processes) and teacher.normalized:
            return None
        wanted = " or ".join(process.title for process in self.processes)
        return (
            f"{type(self).__name__} distils {wanted} whose probabilities sum to one, and this teacher was trained by"
            f" {type(objective).__name__} ({teacher.process.title})"
        )

    def build(self, student: nn.Module, objective: Objective, device: torch.device) -> tuple[LossFn, list[Hook]]:
        constant = [*(each for each in student.parameters() if not each.requires_grad), *student.buffers()]
        teacher = copy.deepcopy(student, {id(each): each for each in constant}).to(device).eval()  # these are shared
        return RoundLoss(self, teacher, 0), [TeacherRounds(self, teacher)]

    def describe(self, steps: int) -> str:
        rounds = self.rounds(steps)
        average = ", teachers are averages" if self.teacher_average else ""
        return (
            f"{type(self).__name__}, {rounds} rounds of {self.steps_per_round:,} steps from {self.sampling_steps}"
            f" sampling steps; the last teacher's were of size {self.step_size(rounds - 1):.4g}{average}"
        )

    @abstractmethod
    def loss(
        self, student: DenoiserLike, teacher: DenoiserLike, batch: Batch, number: int, generator: torch.Generator
    ) -> LossSum:
        """The divergence of the student from its teacher in round `number`; its gradient is the student's only."""


@dataclass(frozen=True)
class RoundLoss:
    """The loss of a round."""

    method: RoundDistillation
    """What is learned."""
    teacher: Any
    """The teacher of the round."""
    number: int
    """The number of the round, from 0."""

    def __call__(self, model: Any, batch: Any, generator: torch.Generator) -> LossSum:
        return with_aux_loss(model, self.method.loss(model, self.teacher, batch, self.number, generator))


class TeacherRounds(Hook):
    """Makes the student the teacher before the first step of each round but the first; checkpoints hold the teacher.

    The number of the round follows from that of the step. Every rank holds the whole teacher.
    """

    def __init__(self, method: RoundDistillation, teacher: nn.Module) -> None:
        self.method, self.teacher = method, teacher
        self.weights = {name: parameter.detach() for name, parameter in trainable_parameters(teacher).items()}
        teacher.requires_grad_(False)

    def before_step(self, trainer: Trainer) -> None:
        number, done = divmod(trainer.state.step, self.method.steps_per_round)
        if number and not done:
            self._replace_teacher(trainer)
        trainer.loss_fn = RoundLoss(self.method, self.teacher, number)

    def after_step(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        metrics["round"] = (trainer.state.step - 1) // self.method.steps_per_round + 1

    def tensors(self) -> dict[str, Tensor]:
        return self.weights

    @torch.no_grad()
    def _replace_teacher(self, trainer: Trainer) -> None:
        average = self.method.teacher_average
        for name, weight in (trainer.ema.weights if average else trainable_parameters(trainer.model)).items():
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # that of a sharded model
            self.weights[name].copy_(whole)


@torch.no_grad()
def predict(teacher: DenoiserLike, z: Tokens, t: Times, positions: Positions, batch: Batch) -> Float[Tensor, "N V"]:
    """The teacher's log_x [N, V], computed as the student's is: in chunks of the head."""
    return teacher(z, t, positions, batch.context, row_fn=lambda log_x, _: log_x)


@dataclass(frozen=True)
class KL:
    """The row function KL(student || target) of each row [n], or KL(target || student) if `forward`."""

    target: LogX
    """[N, V]: the log-probabilities to be learned."""
    mask_id: int
    """The token without probability, whose columns are -inf."""
    forward: bool = False
    """Whether the expectation is the target's."""

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float[Tensor, " n"]:
        mask = torch.tensor([self.mask_id], device=log_x.device)
        student, target = (each.index_fill(-1, mask, 0) for each in (log_x, self.target[indices].to(log_x)))
        if self.forward:
            return (self.target[indices].to(log_x).exp() * (target - student)).sum(-1)
        return (log_x.exp() * (student - target)).sum(-1)
