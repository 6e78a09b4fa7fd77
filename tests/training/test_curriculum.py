"""The curriculum: few hidden tokens first, the true bound at the end."""

from __future__ import annotations

import pytest

from unmask import MDLM, Autoregression
from unmask.diffusion.times import PartTimes
from unmask.training.curriculum import Widening


def test_it_widens_in_a_straight_line_to_the_objective_itself() -> None:
    curriculum, objective = Widening(low=0.2, high=0.4, until=0.5), MDLM(exact_counts=True)
    assert curriculum.applied(objective, 0.0) == MDLM(exact_counts=True, times=PartTimes(0.2, 0.4))
    halfway = curriculum.applied(objective, 0.25).times
    assert isinstance(halfway, PartTimes)
    assert (halfway.low, halfway.high) == pytest.approx((0.1, 0.7))
    assert curriculum.applied(objective, 0.5) is objective
    assert curriculum.applied(objective, 0.99) is objective


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        Widening(low=0.5, high=0.4)
    with pytest.raises(ValueError, match="share of the run"):
        Widening(until=0.0)
    with pytest.raises(ValueError, match="not Autoregression"):
        Widening().applied(Autoregression(), 0.1)
