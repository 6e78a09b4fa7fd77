"""Curricula: few hidden tokens first and the true bound at the end; times at which losses are steady."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny_models
import training_worker as worker
from unmask import MDLM, Batch, BlockDiffusion, NextToken
from unmask.diffusion.time_sampling import ClippedTimes
from unmask.distributed import Distributed
from unmask.training.curriculum import TIME_BINS, TimeWidening, VarianceClipping, loss_moments
from unmask.training.loss import DenoisingLoss
from unmask.training.trainer import Trainer


def test_it_widens_in_a_straight_line_to_the_objective_itself() -> None:
    curriculum, objective = TimeWidening(low=0.2, high=0.4, end_fraction=0.5), MDLM(exact_mask_counts=True)
    hook = curriculum.build_hook(objective, None)

    def objective_at(progress: float) -> MDLM:
        trainer = SimpleNamespace(progress=progress, loss_fn=None)
        hook.before_step(trainer)
        return trainer.loss_fn.objective

    assert objective_at(0.0) == MDLM(exact_mask_counts=True, times=ClippedTimes(0.2, 0.4))
    halfway = objective_at(0.25).times
    assert isinstance(halfway, ClippedTimes)
    assert (halfway.low, halfway.high) == pytest.approx((0.1, 0.7))
    assert objective_at(0.5) == objective
    assert objective_at(0.99) == objective


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        TimeWidening(low=0.5, high=0.4)
    with pytest.raises(ValueError, match="share of the run"):
        TimeWidening(end_fraction=0.0)
    with pytest.raises(ValueError, match="not NextToken"):
        TimeWidening().build_hook(NextToken(), None)


def moments(variances: list[float]) -> torch.Tensor:
    """What a cell with such a variance, and a mean of 2, leaves behind after 100 draws."""
    spread = torch.tensor(variances, dtype=torch.float64)
    return torch.stack([torch.full_like(spread, 100), torch.full_like(spread, 200), 100 * (spread + 4)])


def test_the_steadiest_part_of_the_times_is_chosen() -> None:
    quiet = [9.0] * 6 + [1.0] * 11 + [5.0] * 3
    assert VarianceClipping().choose_times(moments(quiet)) == ClippedTimes(6 / 20, 17 / 20)
    assert VarianceClipping(min_width=0.2).choose_times(moments([*[3.0] * 16, *[0.5] * 4])) == ClippedTimes(0.8, 1.0)
    assert VarianceClipping().choose_times(moments([1.0] * TIME_BINS)) == ClippedTimes(0.0, 1.0)
    nothing = torch.zeros(3, TIME_BINS)
    assert VarianceClipping().choose_times(nothing) == ClippedTimes(0.0, 1.0)


@pytest.mark.parametrize("objective", [BlockDiffusion(block_size=5), MDLM()], ids=["blocks", "rows"])
def test_losses_are_sorted_by_their_time(objective: BlockDiffusion | MDLM) -> None:
    model, clean = tiny_models.tiny_denoiser(objective), torch.tensor([0, 1, 2, 3, 5, 6])
    x = clean[torch.randint(6, (40, tiny_models.LENGTH), generator=torch.Generator().manual_seed(0))]
    valid = torch.ones_like(x, dtype=torch.bool)
    valid[7, 4:], valid[9] = False, False
    batch = Batch(x, valid=valid)
    found = loss_moments(objective, model, batch, torch.Generator().manual_seed(3))
    nats, level = objective.nll_and_level(model, batch, torch.Generator().manual_seed(3))
    block = objective.block_size if isinstance(objective, BlockDiffusion) else tiny_models.LENGTH
    expected = torch.zeros(3, TIME_BINS, dtype=torch.float64)
    for row in range(len(x)):
        for first in range(0, tiny_models.LENGTH, block):
            inside = slice(first, first + block)
            counted = int(valid[row, inside].sum())
            if counted:
                loss = float(nats[row, inside].sum()) / counted
                cell = min(TIME_BINS - 1, int(float(level.t.expand_as(nats)[row, first]) * TIME_BINS))
                expected[:, cell] += torch.tensor([1, loss, loss**2])
    torch.testing.assert_close(found, expected)


def test_clipping_changes_the_times_and_nothing_else() -> None:
    """They are measured every ten steps; between, and after a resume, those of the last measurement hold."""
    settings = replace(worker.TRAINING, curriculum=VarianceClipping(every=10, batches=1), steps=21)
    trainer = worker.build_trainer(settings, 0.0, Distributed(), worker.BLOCKS)
    (hook,) = trainer.hooks
    measured, times, measure = [], [], hook._measure

    def noted(trainer: Trainer) -> ClippedTimes:
        measured.append(trainer.state.step)
        return measure(trainer)

    hook._measure = noted
    for _ in range(21):
        trainer.step()
        assert trainer.loss_fn == DenoisingLoss(replace(worker.BLOCKS, times=ClippedTimes(**hook.state_dict())))
        times.append(hook.state_dict())
    assert measured == [0, 10, 20]
    resumed = VarianceClipping().build_hook(worker.BLOCKS, trainer.batches)
    resumed.load_state_dict(hook.state_dict())
    assert resumed.state_dict() == times[-1] != {"low": 0.0, "high": 1.0}
    for bad, words in (({"every": 0}, "at least 1"), ({"min_width": 1.5}, "a width from")):
        with pytest.raises(ValueError, match=words):
            VarianceClipping(**bad)
