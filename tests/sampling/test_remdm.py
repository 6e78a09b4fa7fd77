"""ReMDM's strategies; the distributions of cap, rescale and loop are enumerated in test_exact.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import tiny_models
from unmask import MDLM
from unmask.diffusion.schedule import LogLinear
from unmask.sampling import ReMDM
from unmask.sampling.canvas import Canvas
from unmask.sampling.remdm import Cap, Conf, Loop, Rescale, _RemaskingSchedule

MASK = 4
LINEAR = LogLinear(eps=0.0)


def test_the_least_sure_tokens_are_the_first_to_go() -> None:
    written = np.array([[0.9, 0.1, np.inf, 0.5], [np.inf] * 4])
    sigma = torch.from_numpy(Conf(eta=0.5).sigma(0.8, written)).float()
    weights = [math.exp(-p) for p in (0.9, 0.1, 0.5)]
    expected = [0.4 * w / sum(weights) for w in weights]
    torch.testing.assert_close(sigma[0, [0, 1, 3]], torch.tensor(expected))
    torch.testing.assert_close(sigma[0, 2], torch.tensor(0.4 / 3))  # masked: the mean
    assert (sigma[1] == 0).all()


def test_confidence_is_the_probability_when_written() -> None:
    """What Conf is given: the token's own probability, and inf as long as it is masked."""
    told: list[torch.Tensor] = []

    class Watched(Conf):
        def sigma(self, sigma_max: float, confidence: NDArray[np.float64]) -> NDArray[np.float64]:
            told.append(torch.from_numpy(confidence.copy()))
            return super().sigma(sigma_max, confidence)

    model, steps = tiny_models.tiny_denoiser(MDLM(schedule=LINEAR)), 12
    blank = torch.full((40, 8), MASK)
    seen = [blank, *ReMDM(steps, Watched()).run(model, Canvas(blank, tuple(range(40))))]
    for step in range(1, steps):
        before, now = seen[step - 1], seen[step]
        assert torch.equal(told[step].isinf(), now == MASK)
        t = torch.full((40, 1), 1 - (step - 1) / steps, dtype=torch.float64)
        p = model(before, t, torch.ones_like(now, dtype=torch.bool)).exp().view(40, 8, -1)
        fresh = (before == MASK) & (now != MASK)
        expected = p.gather(-1, now[..., None])[..., 0]
        torch.testing.assert_close(told[step][fresh], expected[fresh])


@pytest.mark.parametrize("remasking", [Cap(0.1), Rescale(0.3)], ids=lambda r: type(r).__name__)
def test_the_share_of_visible_tokens_is_mdlms_at_every_step(remasking: _RemaskingSchedule) -> None:
    """Marginals are kept: alpha(t), whatever is remasked on the way."""
    rows, steps = 2000, 8
    canvas = Canvas(torch.full((rows, 4), MASK), tuple(range(rows)))
    remasked = 0
    before = canvas.tokens
    for i, z in enumerate(ReMDM(steps, remasking).run(tiny_models.tiny_denoiser(MDLM(schedule=LINEAR)), canvas), 1):
        remasked += int(((z == MASK) & (before != MASK)).sum())
        share, expected = float((z != MASK).float().mean()), i / steps
        assert abs(share - expected) < 4 * math.sqrt(0.25 / (4 * rows)) + 1e-9
        before = z
    assert remasked > 100


def test_a_loop_writes_corrects_and_finishes() -> None:
    level = Loop(t_on=0.6, t_off=0.2, alpha_on=0.9).alphas(10).tolist()
    torch.testing.assert_close(
        torch.tensor(level), torch.tensor([0, 0.225, 0.45, 0.675, 0.9, 0.9, 0.9, 0.9, 0.9, 0.95, 1])
    )


@pytest.mark.parametrize("loop", [None, Loop(t_on=0.6, t_off=0.2, alpha_on=0.75)], ids=["plain", "loop"])
def test_the_least_sure_are_replaced_not_only_removed(loop: Loop | None) -> None:
    """Masked tokens come back at the mean rate: in long rows the share of visible ones stays as it should."""
    rows, steps, length = 40, 10, 96
    model = tiny_models.tiny_denoiser(MDLM(schedule=LINEAR), length=length)
    expected = [i / steps for i in range(steps + 1)] if loop is None else loop.alphas(steps).tolist()
    canvas, rewritten = Canvas(torch.full((rows, length), MASK), tuple(range(rows))), 0
    before = canvas.tokens
    for level, z in zip(expected[1:], ReMDM(steps, Conf(), loop).run(model, canvas), strict=True):
        rewritten += int(((before != MASK) & (z == MASK)).sum())
        assert abs(float((z != MASK).double().mean()) - level) < 0.04
        before = z
    assert rewritten > rows
