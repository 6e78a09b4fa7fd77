"""The loop in one process: what a step does, and what it refuses to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import training_worker as worker
from unmask.distributed import Distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training.curriculum import VarianceClipping
from unmask.training.ema import EMA
from unmask.training.logger import TrainingLogger
from unmask.training.loop import DivergedError, train
from unmask.training.optim import (
    AdamW,
    AnyLRSchedule,
    ConstantLR,
    CosineDecay,
    LinearDecay,
    LRScheduler,
    Muon,
)
from unmask.training.trainer import Trainer


def fresh(**changes: object) -> Trainer:
    return worker.build_trainer(replace(worker.TRAINING, **changes), 0.0, Distributed())  # type: ignore[arg-type]


def weights(run: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


@pytest.mark.parametrize(("optimizer", "steps"), [(AdamW(lr=3e-3), 120), (Muon(), 400)], ids=["AdamW", "Muon"])
def test_the_loss_falls(optimizer: AdamW | Muon, steps: int, tmp_path: Path) -> None:
    run = fresh(optimizer=optimizer, steps=steps, batch_size=32, microbatch_size=None, warmup_steps=10)
    curve = [run.step()["loss"] for _ in range(steps)]
    assert sum(curve[-20:]) < 0.6 * sum(curve[:20])


def test_micro_batches_are_one_batch() -> None:
    adam = AdamW(lr=1e-3, eps=1e-3)  # Muon and a small eps would magnify rounding
    one, many = fresh(microbatch_size=None, optimizer=adam), fresh(microbatch_size=1, optimizer=adam)
    for _ in range(3):
        a, b = one.step(), many.step()
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-5)
    for p, q in zip(weights(one), weights(many), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-4)


def test_block_diffusion_learns_and_its_times_are_clipped_where_losses_are_steady() -> None:
    settings = replace(
        worker.TRAINING,
        steps=150,
        batch_size=32,
        microbatch_size=None,
        warmup_steps=10,
        curriculum=VarianceClipping(every=50),
    )
    run = worker.build_trainer(settings, 0.0, Distributed(), worker.BLOCKS)
    curve = [run.step()["loss"] for _ in range(150)]
    assert sum(curve[-20:]) < 0.9 * sum(curve[:20])
    (clipping,) = (hook.state_dict() for hook in run.hooks)
    assert clipping["high"] - clipping["low"] < 1


def test_computing_again_changes_nothing() -> None:
    plain, again = fresh(), fresh(gradient_checkpointing=True)
    assert again.model.backbone.gradient_checkpointing
    for _ in range(3):
        assert plain.step()["loss"] == again.step()["loss"]
    for p, q in zip(weights(plain), weights(again), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_never_reaches_the_weights(value: float, tmp_path: Path) -> None:
    run = fresh(steps=3)
    run.step()
    before, averaged = weights(run), {k: v.clone() for k, v in run.ema.weights.items()}
    hook = run.model.backbone.lm_head.weight.register_hook(lambda g: g * value)
    figures = run.step()
    hook.remove()
    assert figures["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))
    assert all(torch.equal(averaged[k], v) for k, v in run.ema.weights.items())
    run.step()
    assert not torch.equal(before[0], weights(run)[0])


def test_many_bad_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    run = fresh(steps=100, max_nonfinite_steps=4)
    run.model.backbone.lm_head.weight.register_hook(lambda g: g * math.nan)
    with (
        TrainingLogger(tmp_path, 100, 0) as log,
        pytest.raises(DivergedError, match="4 steps in a row, up to step 4"),
    ):
        train(run, CheckpointStore(tmp_path), log)
    assert "skipped_batch" in (tmp_path / "metrics.jsonl").read_text()


def test_rotation_keeps_two_and_only_deletes_after_the_newest_is_whole(tmp_path: Path) -> None:
    run = fresh(steps=12, save_every=2, keep_checkpoints=1)
    with TrainingLogger(tmp_path, 12, 0) as log:
        train(run, CheckpointStore(tmp_path), log)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000010", "step-00000012"]
    run.state.step = 14
    store = CheckpointStore(tmp_path)
    store.save(14, run._state_dicts(), {})
    (tmp_path / "step-00000014" / "state.json").write_text("{")
    store.delete_old(1)
    assert (tmp_path / "step-00000010").exists()
    step, problems = store.latest()
    assert step == 12
    assert "state.json is damaged" in problems[0]


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fresh(steps=8)
    run.save_checkpoint(CheckpointStore(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run.step()
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.torch.save", full)
    with pytest.raises(OSError, match="No space left"):
        run.save_checkpoint(CheckpointStore(tmp_path))
    assert CheckpointStore(tmp_path).latest()[0] == 0


def test_evaluation_sees_the_averaged_weights(tmp_path: Path) -> None:
    """And training goes on with its own: while evaluating, the two have changed places."""
    run = fresh(steps=6, ema_decay=0.5, eval_every=3)
    seen: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def evaluate() -> dict[str, float]:
        assert not run.model.training
        in_place = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        seen.append((in_place, {name: w.clone() for name, w in run.ema.weights.items()}))
        return {"figure": 1.0}

    with TrainingLogger(tmp_path, 6, 0) as log:
        train(run, CheckpointStore(tmp_path), log, evaluate)
    assert len(seen) == 2
    averaged, own = seen[-1]
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, own[name])
        assert torch.equal(run.ema.weights[name], averaged[name])
    assert any(not torch.equal(averaged[name], own[name]) for name in own)
    assert run.model.training


def test_ema_is_the_weighted_mean() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ema = EMA(model, 0.05)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        ema.update(model)
    expected = 0.05 * (0.95 * 1.0) + 0.95 * 2.0
    torch.testing.assert_close(ema.weights["weight"], torch.tensor([[expected]]))
    with ema.swapped_in(model):
        assert math.isclose(model.weight.item(), expected, rel_tol=1e-6)
    assert model.weight.item() == 2.0


def test_learning_rates() -> None:
    def factor(step: int, warmup_steps: int, schedule: AnyLRSchedule) -> float:
        return LRScheduler([], schedule, warmup_steps, steps=10).factor(step)

    linear = [factor(s, 4, LinearDecay()) for s in range(10)]
    torch.testing.assert_close(torch.tensor(linear[:5]), torch.tensor([0.25, 0.5, 0.75, 1.0, 1.0]))
    assert math.isclose(linear[-1], 1 / 6)
    assert factor(5, 0, ConstantLR()) == 1
    assert math.isclose(factor(5, 0, CosineDecay(min_factor=0.2)), 0.6)
