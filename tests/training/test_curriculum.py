"""Curricula: few hidden tokens first and the true bound at the end; times at which losses are steady."""

from __future__ import annotations

import pytest
import torch

import tiny
from unmask import MDLM, Autoregression, Batch, BlockDiffusion
from unmask.diffusion.times import PartTimes
from unmask.training.curriculum import CELLS, Clipping, Widening, loss_moments


def test_it_widens_in_a_straight_line_to_the_objective_itself() -> None:
    curriculum, objective = Widening(low=0.2, high=0.4, until=0.5), MDLM(exact_counts=True)
    assert curriculum.applied(objective, 0.0, PartTimes()) == MDLM(
        exact_counts=True, times=PartTimes(0.2, 0.4)
    )
    halfway = curriculum.applied(objective, 0.25, PartTimes()).times
    assert isinstance(halfway, PartTimes)
    assert (halfway.low, halfway.high) == pytest.approx((0.1, 0.7))
    assert curriculum.applied(objective, 0.5, PartTimes()) is objective
    assert curriculum.applied(objective, 0.99, PartTimes()) is objective


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        Widening(low=0.5, high=0.4)
    with pytest.raises(ValueError, match="share of the run"):
        Widening(until=0.0)
    with pytest.raises(ValueError, match="not Autoregression"):
        Widening().applied(Autoregression(), 0.1, PartTimes())


def moments(variances: list[float]) -> torch.Tensor:
    """What a cell with such a variance, and a mean of 2, leaves behind after 100 draws."""
    spread = torch.tensor(variances, dtype=torch.float64)
    return torch.stack([torch.full_like(spread, 100), torch.full_like(spread, 200), 100 * (spread + 4)])


def test_the_steadiest_part_of_the_times_is_chosen() -> None:
    quiet = [9.0] * 6 + [1.0] * 11 + [5.0] * 3
    assert Clipping().chosen(moments(quiet)) == PartTimes(6 / 20, 17 / 20)
    assert Clipping(narrowest=0.2).chosen(moments([*[3.0] * 16, *[0.5] * 4])) == PartTimes(0.8, 1.0)
    assert Clipping().chosen(moments([1.0] * CELLS)) == PartTimes(0.0, 1.0)
    nothing = torch.zeros(3, CELLS)
    assert Clipping().chosen(nothing) == PartTimes(0.0, 1.0)


@pytest.mark.parametrize("objective", [BlockDiffusion(block=5), MDLM()], ids=["blocks", "rows"])
def test_losses_are_sorted_by_their_time(objective: BlockDiffusion | MDLM) -> None:
    model, clean = tiny.denoiser(objective), torch.tensor([0, 1, 2, 3, 5, 6])
    x = clean[torch.randint(6, (40, tiny.LENGTH), generator=torch.Generator().manual_seed(0))]
    valid = torch.ones_like(x, dtype=torch.bool)
    valid[7, 4:], valid[9] = False, False
    batch = Batch(x, valid=valid)
    found = loss_moments(objective, model, batch, torch.Generator().manual_seed(3))
    nats, t = objective.timed_nll(model, batch, torch.Generator().manual_seed(3))
    block = objective.block if isinstance(objective, BlockDiffusion) else tiny.LENGTH
    expected = torch.zeros(3, CELLS, dtype=torch.float64)
    for row in range(len(x)):
        for first in range(0, tiny.LENGTH, block):
            inside = slice(first, first + block)
            counted = int(valid[row, inside].sum())
            if counted:
                loss = float(nats[row, inside].sum()) / counted
                cell = min(CELLS - 1, int(float(t.expand_as(nats)[row, first]) * CELLS))
                expected[:, cell] += torch.tensor([1, loss, loss**2])
    torch.testing.assert_close(found, expected)


def test_clipping_changes_the_times_and_nothing_else() -> None:
    curriculum, objective = Clipping(every=10), BlockDiffusion(block=3)
    assert [step for step in range(31) if curriculum.due(step)] == [0, 10, 20, 30]
    part = PartTimes(0.3, 0.8)
    assert curriculum.applied(objective, 0.5, part) == BlockDiffusion(block=3, times=part)
    for bad, words in (({"every": 0}, "at least 1"), ({"narrowest": 1.5}, "a width from")):
        with pytest.raises(ValueError, match=words):
            Clipping(**bad)
