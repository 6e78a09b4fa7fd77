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


def averaged_loss(
    denoiser: TextDenoiser,
    x: Text,
    monkeypatch: pytest.MonkeyPatch,
    schedule: Schedule = LogLinear(eps=0),  # noqa: B008
    given: int = 0,
) -> float:
    """The mean of the loss over all noise, by quadrature over p = v^2; the first tokens may be given."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    objective, total = FlexMDM(schedule=schedule), 0.0
    for v, weight in zip(((nodes + 1) / 2).tolist(), weights.tolist(), strict=True):
        u = torch.full((3 ** (len(x) - given), 1), v**2, dtype=torch.float64)
        states = cells(x[given:], float(1 - continuous_level(schedule, u).alpha[0]))
        uniform = torch.tensor([[0.0] * given + cell[2] for cell in states], dtype=torch.float64)
        noise = Noise(u, torch.ones_like(u), uniform)
        monkeypatch.setattr(flexmdm, "sample_noise", lambda *_, noise=noise: noise)
        prompt = torch.arange(len(x)).expand(len(states), -1) < given
        batch = Batch(torch.tensor([x] * len(states)), prompt_mask=prompt)
        nats = objective.token_nll(denoiser, batch, torch.Generator())
        assert not nats[prompt].any()
        total += weight * v * sum(cell[1] * float(each) for cell, each in zip(states, nats.sum(1), strict=True))
    return total


@pytest.mark.parametrize("schedule", [LogLinear(eps=0), LogLinear(), Cosine()], ids=repr)
def test_the_loss_is_the_enumerated_bound(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms that it leaves out average to zero, at every schedule."""
    predict = random_table()
    denoiser = TextDenoiser(predict, FlexMDM(schedule=schedule))
    for x in ((0, 1, 1), (1,)):
        assert averaged_loss(denoiser, x, monkeypatch, schedule) == pytest.approx(bound(predict, x), abs=2e-3)


def test_after_given_tokens_it_is_the_conditional_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing before the first token, so whatever is predicted there does not count."""
    joint = random_joint()
    after = {x: p for x, p in joint.items() if x[:1] == (1,)}
    predict_rest = exact({x[1:]: p for x, p in after.items()})

    def predict(z: Text, p: float) -> np.ndarray:
        assert z[0] == 1
        return np.vstack([[0.0, 0.0, 50.0], predict_rest(z[1:], p)])

    for x in ((1, 0), (1, 1, 0)):
        expected = -math.log(after[x] / sum(after.values()))
        assert averaged_loss(TextDenoiser(predict), x, monkeypatch, given=1) == pytest.approx(expected, abs=2e-3)


def test_rows_with_holes_are_trained_on_what_is_in_them() -> None:
    """Tokens between two given ones are never missing, and gaps may be missing where holes are, even empty ones."""
    objective = FlexMDM(longest_hole=4)
    host = Batch(torch.zeros(200, 40, dtype=torch.int64), valid=torch.arange(40).expand(200, -1) < 30)
    uniform = torch.rand(200, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counted, gaps = objective._draw_holes(uniform, host)
    beside = torch.zeros_like(gaps)
    beside[:, :-1] |= counted
    beside[:, 1:] |= counted
    assert not counted[:, 30:].any()
    assert (gaps[:, :30] | ~beside[:, :30]).all()
    assert (gaps & ~beside)[:, :30].any(), "empty holes"
    assert not gaps[:, :30].all()
    runs = "".join("x" if each else "." for each in counted[:, :30].flatten().tolist())
    assert 0.15 < runs.count("x") / len(runs) < 0.45


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hole_share": 1.5}, "hole_share, a share of the rows"),
        ({"longest_hole": 0}, "longest_hole must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FlexMDM(**settings)  # type: ignore[arg-type]
