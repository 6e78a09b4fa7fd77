"""The baseline is exact: its nats are -log p of a distribution, and its sampler draws from that one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy import stats

import tiny_models
from unmask import Batch, NextToken
from unmask.sampling import Autoregressive
from unmask.sampling.canvas import Canvas

LENGTH, CLEAN, MASK = 3, 3, 3
MODEL = tiny_models.tiny_denoiser(NextToken(), size=CLEAN + 1, mask=MASK)
TEXTS = list(itertools.product(range(CLEAN), repeat=LENGTH))


def log_p() -> torch.Tensor:
    nats = NextToken().token_nll(MODEL, Batch(torch.tensor(TEXTS)), torch.Generator())
    return -nats.sum(1)


def test_all_texts_together_have_probability_one() -> None:
    assert math.isclose(float(log_p().exp().sum()), 1, rel_tol=1e-9)


def test_a_token_does_not_depend_on_those_after_it() -> None:
    x = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    nats = NextToken().token_nll(MODEL, Batch(x), torch.Generator())
    torch.testing.assert_close(nats[0, :2], nats[1, :2])
    assert not torch.allclose(nats[0, 3], nats[1, 3])


def test_the_cached_sampler_draws_from_that_distribution() -> None:
    n, p = 5000, log_p().exp()
    *_, z = Autoregressive().run(MODEL, Canvas(torch.full((n, LENGTH), MASK), tuple(range(n))))
    seen = np.bincount((z * torch.tensor([9, 3, 1])).sum(1).numpy(), minlength=27)
    assert stats.chisquare(seen, p.numpy() * n / float(p.sum())).pvalue > 1e-3


def test_a_prompt_conditions_what_follows() -> None:
    n, p = 5000, log_p().exp().view(3, 3, 3)[1]
    canvas = torch.full((n, LENGTH), MASK)
    canvas[:, 0] = 1
    *_, z = Autoregressive().run(MODEL, Canvas(canvas, tuple(range(n))))
    seen = np.bincount((z[:, 1:] * torch.tensor([3, 1])).sum(1).numpy(), minlength=9)
    assert stats.chisquare(seen, (p / p.sum()).flatten().numpy() * n).pvalue > 1e-3
