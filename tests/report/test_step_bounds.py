"""Bounds of T-step samplers: the same estimate as the plain one, with less noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny_models
from unmask.data.loader import Loader, Wrapped
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.objectives import D3PM, MDLM, SEDD, NextToken, UniformDiffusion
from unmask.report.step_bounds import _discretize, _is_weighted_nll, _ShiftedDenoiser, why_no_step_bounds


class Stream:
    """Ids without a file."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def document_ends(self) -> np.ndarray:
        return np.array([len(self.ids)])

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_a_discount_changes_the_noise_and_not_the_mean(steps: int) -> None:
    objective = MDLM(steps=steps)
    denoise = tiny_models.tiny_denoiser(MDLM())
    loader = Loader(Stream(np.arange(8 * tiny_models.LENGTH) % 4), Wrapped(tiny_models.LENGTH), batch_size=8)
    with torch.inference_mode():
        plain = score_corpus(denoise, objective, loader, EvalConfig(replicates=100))
        less = 0.9 * plain.nats_per_token
        steady = score_corpus(_ShiftedDenoiser(denoise, less), objective, loader, EvalConfig(replicates=100, seed=1))
    difference = steady.nats_per_token + less - plain.nats_per_token
    assert abs(difference) <= 4 * (plain.standard_error + steady.standard_error) + 1e-6
    assert plain.standard_error == pytest.approx(0, abs=1e-6) if steps == 1 else plain.standard_error > 0
    assert steps == 1 or steady.standard_error < 0.8 * plain.standard_error


def test_who_has_bounds_in_steps_and_who_may_be_discounted() -> None:
    assert _discretize(MDLM(exact_mask_counts=True), 8) == MDLM(steps=8)
    assert _discretize(D3PM(), 8) == D3PM(steps=8)
    assert _discretize(UniformDiffusion(), 8) == UniformDiffusion(steps=8)
    with pytest.raises(ValueError, match="SEDD has no version in 8 steps"):
        _discretize(SEDD(), 8)
    assert [why_no_step_bounds(o) is None for o in (MDLM(), D3PM(), UniformDiffusion())] == [True] * 3
    assert [why_no_step_bounds(o) is None for o in (SEDD(), NextToken())] == [False] * 2
    assert [_is_weighted_nll(o) for o in (MDLM(), D3PM(), MDLM(carry_over=False), UniformDiffusion())] == [
        True,
        False,
        False,
        False,
    ]
