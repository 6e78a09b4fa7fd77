"""ReMDM's strategies; the distributions of cap, rescale and loop are enumerated in test_exact.py."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from unmask import MDLM
from unmask.diffusion.schedule import LogLinear
from unmask.sampling import Remask
from unmask.sampling.canvas import Canvas
from unmask.sampling.remask import AnyRemasking, Cap, LeastSure, Loop, Rescale

MASK = 4
LINEAR = LogLinear(eps=0.0)


def test_the_least_sure_tokens_are_the_first_to_go() -> None:
    written = torch.tensor([[0.9, 0.1, torch.inf, 0.5], [torch.inf] * 4])
    sigma = LeastSure(eta=0.5).sigma(0.8, written)
    weights = [math.exp(-p) for p in (0.9, 0.1, 0.5)]
    expected = [0.4 * w / sum(weights) for w in weights]
    torch.testing.assert_close(sigma[0, [0, 1, 3]], torch.tensor(expected))
    assert sigma[0, 2] == 0
    assert (sigma[1] == 0).all()


@pytest.mark.parametrize("remasking", [Cap(0.1), Rescale(0.3)], ids=lambda r: type(r).__name__)
def test_the_share_of_visible_tokens_is_mdlms_at_every_step(remasking: AnyRemasking) -> None:
    """Marginals are kept: alpha(t), whatever is remasked on the way."""
    rows, steps = 2000, 8
    canvas = Canvas(torch.full((rows, 4), MASK), tuple(range(rows)))
    remasked = 0
    before = canvas.tokens
    for i, z in enumerate(Remask(steps, remasking).run(tiny.denoiser(MDLM(schedule=LINEAR)), canvas), 1):
        remasked += int(((z == MASK) & (before != MASK)).sum())
        share, expected = float((z != MASK).float().mean()), i / steps
        assert abs(share - expected) < 4 * math.sqrt(0.25 / (4 * rows)) + 1e-9
        before = z
    assert remasked > 100


def test_a_loop_writes_corrects_and_finishes() -> None:
    level = Loop(on=0.6, off=0.2, visible=0.9).levels(10).tolist()
    torch.testing.assert_close(
        torch.tensor(level), torch.tensor([0, 0.225, 0.45, 0.675, 0.9, 0.9, 0.9, 0.9, 0.9, 0.95, 1])
    )
