"""FlexMDM against enumeration over all noisy texts, and all times: its bound, its loss, its training with holes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from text_oracle import TEXTS, Text, TextDenoiser, bound, cells, exact, law, random_joint, random_table
from unmask import Batch
from unmask.diffusion.noise_level import continuous_level
from unmask.diffusion.schedule import Cosine, LogLinear, Schedule
from unmask.objectives import FlexMDM, flexmdm
from unmask.objectives.base import Noise


@pytest.mark.parametrize("x", TEXTS, ids=str)
def test_the_bound_is_an_equation_for_the_exact_posterior(x: Text) -> None:
    joint = random_joint()
    assert bound(exact(joint), x) == pytest.approx(-math.log(joint[x]), abs=1e-4)


def test_the_jump_process_of_the_exact_posterior_makes_its_distribution() -> None:
    joint = random_joint()
    made = law(exact(joint))
    assert made == pytest.approx(joint, abs=2e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_bound_is_above_the_model_s_own_law(seed: int) -> None:
    predict = random_table(seed)
    made = law(predict)
    assert sum(made.values()) == pytest.approx(1, abs=1e-6)
    excess = {x: bound(predict, x) + math.log(made[x]) for x in TEXTS}
    assert min(excess.values()) > -1e-4
    assert max(excess.values()) > 0.01


@pytest.mark.parametrize("schedule", [LogLinear(eps=0), LogLinear(), Cosine()], ids=repr)
def test_the_loss_is_the_enumerated_bound(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every p, the loss averaged over all cells has the value of the KL but for terms that average to zero."""
    predict, objective = random_table(), FlexMDM(schedule=schedule)
    denoiser = TextDenoiser(predict, objective)
    nodes, weights = np.polynomial.legendre.leggauss(24)
    for x in ((0, 1, 1), (1,)):
        total = 0.0
        for v, weight in zip(((nodes + 1) / 2).tolist(), weights.tolist(), strict=True):
            u = torch.full((3 ** len(x), 1), v**2, dtype=torch.float64)
            states = cells(x, float(1 - continuous_level(schedule, u).alpha[0]))
            noise = Noise(u, torch.ones_like(u), torch.tensor([cell[2] for cell in states], dtype=torch.float64))
            monkeypatch.setattr(flexmdm, "sample_noise", lambda *_, noise=noise: noise)
            nats = objective.token_nll(denoiser, Batch(torch.tensor([x] * len(states))), torch.Generator()).sum(1)
            total += weight * v * sum(cell[1] * float(each) for cell, each in zip(states, nats, strict=True))
        assert total == pytest.approx(bound(predict, x), abs=2e-3)
