"""The trainer takes any loss and any batches: a classifier and a regression, resumed, averaged, on two ranks.

Started as a program, this file is its own worker: `test_any_loss.py FOLDER TASK STEPS`.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import host_reads
from processes import run_program
from unmask.distributed import Distributed, init_distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training.config import TrainingConfig
from unmask.training.hooks import Hook
from unmask.training.logger import TrainingLogger
from unmask.training.loop import train
from unmask.training.loss import LossSum
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer

CONFIG = TrainingConfig(
    steps=60,
    batch_size=7,
    microbatch_size=2,
    optimizer=AdamW(lr=2e-2, eps=1e-4),
    warmup_steps=2,
    ema_decay=0.8,
    bf16=False,
    log_every=1,
    save_every=5,
)


@dataclass(frozen=True)
class Labelled:
    """Token ids [B, 6], and which of two classes each row is of; or continuous inputs and targets."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: torch.device) -> Labelled:
        return Labelled(self.inputs.to(device), self.targets.to(device))


class LabelledTexts:
    """Class 1 are the rows with more tokens above 4 than below."""

    def batch(self, step: int, row_offset: int, count: int) -> Labelled:
        tokens = torch.randint(10, (1000, 6), generator=torch.Generator().manual_seed(step))
        rows = tokens[row_offset : row_offset + count]
        return Labelled(rows, (rows > 4).sum(1).gt(3).long())


class Points:
    """y = x . (1, -2, 3) + 1, of continuous x."""

    def batch(self, step: int, row_offset: int, count: int) -> Labelled:
        x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(step))[row_offset : row_offset + count]
        return Labelled(x, x @ torch.tensor([1.0, -2.0, 3.0]) + 1)


def classification_loss(model: Any, batch: Labelled, generator: torch.Generator) -> LossSum:
    logits = model(batch.inputs)
    correct = (logits.argmax(-1) == batch.targets).sum()
    total = F.cross_entropy(logits, batch.targets, reduction="sum")
    return LossSum(total, len(batch), {"accuracy": correct})


def regression_loss(model: Any, batch: Labelled, generator: torch.Generator) -> LossSum:
    error = model(batch.inputs)[:, 0] - batch.targets
    return LossSum(error.square().sum(), torch.tensor(len(batch)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(10, 8), nn.Dropout(0.1), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.embedding(tokens)).mean(1))
        return logits


class CountingHook(Hook):
    """Remembers how many steps were taken, also before a resume."""

    def __init__(self) -> None:
        self.before = self.after = 0

    def before_step(self, trainer: Trainer) -> None:
        self.before += 1

    def after_step(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.after += 1
        metrics["counted_steps"] = self.after

    def state_dict(self) -> dict[str, int]:
        return {"before": self.before, "after": self.after}

    def load_state_dict(self, state: Any) -> None:
        self.before, self.after = state["before"], state["after"]


def build(task: str, distributed: Distributed = Distributed(), **changes: Any) -> Trainer:  # noqa: B008
    torch.manual_seed(0)
    config = replace(CONFIG, **changes)
    hooks = [CountingHook()]
    if task == "classifier":
        return Trainer(Classifier(), classification_loss, LabelledTexts(), config, hooks, distributed=distributed)
    return Trainer(nn.Linear(3, 1), regression_loss, Points(), config, hooks, distributed=distributed)


def run(trainer: Trainer, folder: Path) -> list[dict[str, float]]:
    """Train from the newest checkpoint to the end; all steps that are logged."""
    checkpoints = CheckpointStore(folder, trainer.distributed)
    step, _ = checkpoints.latest()
    if step is not None:
        trainer.load_checkpoint(checkpoints, step)
    quiet = not trainer.distributed.is_main
    with TrainingLogger(folder, trainer.config.steps, trainer.state.step, quiet) as log:
        assert train(trainer, checkpoints, log)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TASKS = ("classifier", "regression")


@pytest.mark.parametrize("task", TASKS)
def test_it_learns(task: str, tmp_path: Path) -> None:
    log = run(build(task, steps=150, batch_size=32, microbatch_size=None), tmp_path)
    assert sum(line["loss"] for line in log[-10:]) < 0.5 * sum(line["loss"] for line in log[:10])
    assert log[-1]["counted_steps"] == 150
    assert log[-1]["tokens"] == 150 * 32
    if task == "classifier":
        assert sum(line["accuracy"] for line in log[-10:]) / 10 > 0.9


@pytest.mark.parametrize("task", TASKS)
def test_it_resumes_bit_for_bit_with_its_average_and_the_state_of_its_hooks(task: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    uninterrupted = build(task, steps=20)
    curve = run(uninterrupted, whole)
    first = build(task, steps=20)
    for _ in range(7):
        first.step()
    first.save_checkpoint(CheckpointStore(resumed))
    second = build(task, steps=20)
    for now, before in zip(run(second, resumed), curve[7:], strict=True):
        assert (now["step"], now["loss"], now["counted_steps"]) == (
            before["step"],
            before["loss"],
            before["counted_steps"],
        )
    for name, weight in uninterrupted.ema.weights.items():
        assert torch.equal(weight, second.ema.weights[name])
        assert not torch.equal(weight, dict(second.model.named_parameters())[name])


@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_give_the_same_curve(task: str, tmp_path: Path) -> None:
    """With 7 rows in micro-batches of 2: the ranks have 3 and 4 of them. Dropout depends on the rank."""
    done = run_program(__file__, tmp_path, task, 8, ranks=2)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    alone = build(task, steps=8)
    alone.model.eval()
    for line in ranks:
        metrics = alone.step()
        assert math.isclose(line["loss"], metrics["loss"], rel_tol=1e-4)
        assert math.isclose(line.get("accuracy", 0), metrics.get("accuracy", 0), rel_tol=1e-9)


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
def test_gradients_are_those_of_the_mean_loss_clipped_as_torch_does(max_norm: float) -> None:
    trainer, reference = build("regression", max_grad_norm=max_norm), build("regression").model
    batch = Points().batch(0, 0, CONFIG.batch_size)
    loss = F.mse_loss(reference(batch.inputs)[:, 0], batch.targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    gradients: list[Tensor] = []
    (optimizer,) = trainer.optimizers
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in trainer.model.parameters()) or None
    )
    metrics = trainer.step()
    assert metrics["loss"] == pytest.approx(float(loss.detach()))
    assert metrics["grad_norm"] == pytest.approx(float(norm))
    for ours, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    model.unused = nn.Parameter(torch.ones(2))
    trainer = Trainer(model, regression_loss, Points(), CONFIG)
    trainer.step()
    assert torch.equal(model.unused, torch.ones(2))


def test_what_does_not_fit_is_refused_in_one_sentence() -> None:
    class Short(Points):
        def batch(self, step: int, row_offset: int, count: int) -> Labelled:
            return super().batch(step, row_offset, max(1, count - 1))

    trainer = Trainer(nn.Linear(3, 1), regression_loss, Short(), CONFIG)
    with pytest.raises(ValueError, match=r"^batch\(0, 1, 2\) must have 2 rows; got 1$"):
        trainer.step()
    with pytest.raises(ValueError, match="gradient_checkpointing needs a model with a backbone; Linear has none"):
        Trainer(nn.Linear(3, 1), regression_loss, Points(), replace(CONFIG, gradient_checkpointing=True))


def test_the_trainer_itself_reads_one_value_of_a_step_from_the_device() -> None:
    """Loss, count, gradient norm and metrics are read together; what is finite is decided from them."""
    trainer = build("classifier", microbatch_size=2)
    for _ in range(4):
        trainer.step()
    with host_reads.host_reads() as reads:
        metrics = trainer.step()
    assert reads.total == 1, reads
    assert 0 <= metrics["accuracy"] <= 1


def main() -> None:
    folder, task, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    with init_distributed() as distributed:
        trainer = build(task, distributed, steps=steps)
        trainer.model.dropout = nn.Identity()
        run(trainer, folder)


if __name__ == "__main__":
    main()
