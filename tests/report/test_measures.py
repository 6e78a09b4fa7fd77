"""Bounds of T-step samplers: the same estimate as the plain one, with less noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from unmask.data.loader import Loader, Wrapped
from unmask.evaluation.likelihood import score_rows
from unmask.objectives import D3PM, MDLM, SEDD, Autoregression, UniformDiffusion
from unmask.report.measures import Discount, _in_steps, _weighs_one, no_step_bounds


class Stream:
    """Ids without a file."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def ends(self) -> np.ndarray:
        return np.array([len(self.ids)])

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_a_discount_changes_the_noise_and_not_the_mean(steps: int) -> None:
    objective = MDLM(steps=steps)
    denoise = tiny.denoiser(MDLM())
    loader = Loader(Stream(np.arange(8 * tiny.LENGTH) % 4), Wrapped(tiny.LENGTH), batch_size=8)
    with torch.inference_mode():
        plain = score_rows(denoise, objective, loader, None, None, 100, 0)
        less = 0.9 * plain.nats_per_token
        steady = score_rows(Discount(denoise, less), objective, loader, None, None, 100, 1)
    difference = steady.nats_per_token + less - plain.nats_per_token
    assert abs(difference) <= 4 * (plain.standard_error + steady.standard_error) + 1e-6
    assert plain.standard_error == pytest.approx(0, abs=1e-6) if steps == 1 else plain.standard_error > 0
    assert steps == 1 or steady.standard_error < 0.8 * plain.standard_error


def test_who_has_bounds_in_steps_and_who_may_be_discounted() -> None:
    assert _in_steps(MDLM(exact_counts=True), 8) == MDLM(steps=8)
    assert _in_steps(D3PM(), 8) == D3PM(steps=8)
    assert _in_steps(UniformDiffusion(), 8) == UniformDiffusion(steps=8)
    with pytest.raises(ValueError, match="SEDD has no version in 8 steps"):
        _in_steps(SEDD(), 8)
    assert [no_step_bounds(o) is None for o in (MDLM(), D3PM(), UniformDiffusion())] == [True] * 3
    assert [no_step_bounds(o) is None for o in (SEDD(), Autoregression())] == [False] * 2
    assert [_weighs_one(o) for o in (MDLM(), D3PM(), MDLM(carry_over=False), UniformDiffusion())] == [
        True,
        False,
        False,
        False,
    ]
