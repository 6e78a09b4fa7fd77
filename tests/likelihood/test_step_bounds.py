"""Bounds of T-step samplers: the same estimate as the plain one, with less noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny_models
from unmask.data.loader import Loader, Wrapped
from unmask.likelihood._estimate import NatsEstimator
from unmask.likelihood.corpus import EvalConfig
from unmask.likelihood.step_bounds import StepBound, step_bounds, why_no_step_bounds
from unmask.objectives import D3PM, MDLM, SEDD, BlockDiffusion, NextToken, UniformDiffusion


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


@pytest.mark.parametrize(
    ("objective", "steps"),
    [(MDLM(), 1), (MDLM(), 3), (MDLM(), 16), (D3PM(), 3), (MDLM(carry_over=False), 3)],
    ids=["mdlm-1", "mdlm-3", "mdlm-16", "d3pm", "no carry-over"],
)
def test_the_control_variate_changes_the_noise_and_not_the_mean(
    objective: MDLM | D3PM, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    denoise = tiny_models.tiny_denoiser(objective)
    loader = Loader(Stream(np.arange(8 * tiny_models.LENGTH) % 4), Wrapped(tiny_models.LENGTH), batch_size=8)

    def bound(seed: int) -> StepBound:
        with torch.inference_mode():
            return step_bounds(denoise, objective, loader, (steps,), EvalConfig(replicates=60, seed=seed))[0]

    steady = bound(0)
    monkeypatch.setattr(NatsEstimator, "token_baseline", lambda *_: None)
    plain = bound(1)
    difference = steady.nats_per_token - plain.nats_per_token
    assert abs(difference) <= 4 * (plain.standard_error + steady.standard_error) + 1e-6
    if steps > 1:
        assert steady.standard_error < 0.8 * plain.standard_error


def test_which_objectives_have_bounds_in_steps() -> None:
    assert MDLM(exact_mask_counts=True).in_steps(8) == MDLM(steps=8)
    assert D3PM().in_steps(8) == D3PM(steps=8)
    assert UniformDiffusion().in_steps(8) == UniformDiffusion(steps=8)
    assert UniformDiffusion().in_steps(None) == UniformDiffusion(steps=None)
    for objective in (MDLM(), D3PM(), UniformDiffusion()):
        assert why_no_step_bounds(objective) is None
    for objective in (SEDD(), BlockDiffusion()):
        assert "continuous time only" in str(why_no_step_bounds(objective))
    assert "one token at a time" in str(why_no_step_bounds(NextToken()))
