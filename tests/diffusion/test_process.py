from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn.functional import one_hot

from unmask.diffusion.process import Masking, UniformNoise, posterior
from unmask.types import Vocab

PROCESSES = [Masking(), UniformNoise()]
VOCABS = [Vocab(5, 4), Vocab(5, 0), Vocab(5, 2)]

every_process = pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
every_mask = pytest.mark.parametrize("vocab", VOCABS, ids=lambda v: f"mask{v.mask_id}")


def transitions(pi: Tensor, alpha: float) -> Tensor:
    """Q[i, j] = P(j later | i earlier) = alpha I + (1 - alpha) 1 pi^T."""
    return alpha * torch.eye(len(pi), dtype=torch.float64) + (1 - alpha) * pi.expand(len(pi), -1)


def distribution(seed: int, size: int) -> Tensor:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return weights / weights.sum()


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 6),
    seed=st.integers(0, 10_000),
    alpha_s=st.floats(0.01, 1),
    ratio=st.floats(0, 0.999),
    at=st.integers(0, 5),
)
def test_posterior_is_bayes_rule(size: int, seed: int, alpha_s: float, ratio: float, at: int) -> None:
    pi, x = distribution(seed, size), distribution(seed + 1, size)
    z_t = at % size
    prior = x @ transitions(pi, alpha_s)  # q(z_s | x), x a soft prediction
    likelihood = transitions(pi, ratio)[:, z_t]  # q(z_t | z_s) for every z_s
    expected = prior * likelihood / (prior @ likelihood)
    z = one_hot(torch.tensor(z_t), size).double()
    actual = posterior(z, x, pi, scalar(alpha_s), scalar(alpha_s * ratio))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_posterior_of_a_batch_is_that_of_its_lines() -> None:
    pi = distribution(0, 4)
    z, x = one_hot(torch.tensor([0, 3]), 4).double(), torch.stack([distribution(1, 4), distribution(2, 4)])
    alpha_s, alpha_t = torch.tensor([[0.9], [0.5]]).double(), torch.tensor([[0.4], [0.3]]).double()
    together = posterior(z, x, pi, alpha_s, alpha_t)
    for n in range(2):
        torch.testing.assert_close(together[n], posterior(z[n], x[n], pi, alpha_s[n], alpha_t[n]))


@every_mask
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), alpha_t=st.floats(0, 0.99), gap=st.floats(0.01, 1))
def test_masking_reveals_a_hidden_token_with_its_jump(vocab: Vocab, seed: int, alpha_t: float, gap: float) -> None:
    t, s = scalar(alpha_t), scalar(alpha_t + gap * (1 - alpha_t))
    clean = torch.arange(vocab.size) != vocab.mask_id
    x = torch.zeros(vocab.size, dtype=torch.float64)
    x[clean] = distribution(seed, vocab.size - 1)
    pi = Masking().pi(vocab)  # all noise is the mask, so z_t = mask is pi itself
    after = posterior(pi, x, pi, s, t)
    torch.testing.assert_close(after[clean], Masking.unmask_prob(s, t) * x[clean], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after[vocab.mask_id], 1 - Masking.unmask_prob(s, t), rtol=1e-9, atol=1e-12)


def test_reveal_is_the_share_of_hidden_tokens_that_the_step_shows() -> None:
    assert float(Masking.unmask_prob(scalar(0.75), scalar(0.5))) == 0.5
    assert float(Masking.unmask_prob(scalar(1.0), scalar(0.3))) == 1


@every_mask
def test_masking_keeps_a_visible_token(vocab: Vocab) -> None:
    for token in (token for token in range(vocab.size) if token != vocab.mask_id):
        z = one_hot(torch.tensor(token), vocab.size).double()
        after = posterior(z, z, Masking().pi(vocab), scalar(0.7), scalar(0.4))
        torch.testing.assert_close(after, z)


@every_process
@every_mask
def test_pi_is_a_distribution_with_the_right_support(process: Masking | UniformNoise, vocab: Vocab) -> None:
    pi = process.pi(vocab)
    support = pi.nonzero()[:, 0].tolist()
    others = [token for token in range(vocab.size) if token != vocab.mask_id]
    assert support == ([vocab.mask_id] if isinstance(process, Masking) else others)
    torch.testing.assert_close(pi[support], torch.full((len(support),), 1 / len(support)).double())


@every_process
@every_mask
@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.9, 1.0])
def test_corrupt_has_the_marginals_of_the_process(process: Masking | UniformNoise, vocab: Vocab, alpha: float) -> None:
    draws = 40_000
    uniform = torch.rand(1, draws, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for token in (token for token in range(vocab.size) if token != vocab.mask_id):
        z = process.corrupt(torch.full((1, draws), token), torch.full((1, 1), alpha).double(), uniform, vocab)
        counts = torch.bincount(z[0], minlength=vocab.size)
        expected = transitions(process.pi(vocab), alpha)[token] * draws
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        if possible.sum() > 1:
            assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-4


@every_process
def test_corrupt_masks_each_sequence_at_its_own_level(process: Masking | UniformNoise) -> None:
    vocab, draws = Vocab(1001, 1000), 20_000
    uniform = torch.rand(2, draws, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    alpha = torch.tensor([[0.2], [0.8]], dtype=torch.float64)
    z = process.corrupt(torch.zeros(2, draws, dtype=torch.int64), alpha, uniform, vocab)
    for row, level in zip(z, (0.2, 0.8), strict=True):
        changed = 1 - level if isinstance(process, Masking) else (1 - level) * (1 - 1 / 1000)
        sigma = math.sqrt(draws * changed * (1 - changed))
        assert abs(int((row != 0).sum()) - draws * changed) < 4 * sigma


@every_mask
@settings(deadline=None, max_examples=60)
@given(alpha=st.floats(0, 1), uniform=st.floats(0, 1, exclude_max=True), token=st.integers(0, 3))
def test_uniform_noise_never_makes_the_mask(vocab: Vocab, alpha: float, uniform: float, token: int) -> None:
    x = torch.tensor([[token + (token >= vocab.mask_id)]])
    z = int(UniformNoise().corrupt(x, scalar(alpha).view(1, 1), torch.tensor([[uniform]]).double(), vocab))
    assert 0 <= z < vocab.size
    assert z != vocab.mask_id


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.6])
def test_the_last_uniform_that_makes_noise_makes_the_last_token(alpha: float) -> None:
    uniform = torch.tensor([[math.nextafter(1 - alpha, 0)]], dtype=torch.float64)
    z = UniformNoise().corrupt(torch.tensor([[0]]), scalar(alpha).view(1, 1), uniform, Vocab(6, 5))
    assert int(z) == 4


@every_process
@every_mask
def test_two_steps_of_noise_are_one(process: Masking | UniformNoise, vocab: Vocab) -> None:
    def measured(alpha: float) -> Tensor:
        """Q as `corrupt` makes it from every token (the mask too), over an even grid of uniforms."""
        points = 20_000
        grid = ((torch.arange(points, dtype=torch.float64) + 0.5) / points).expand(vocab.size, -1)
        x = torch.arange(vocab.size)[:, None].expand(-1, points)
        z = process.corrupt(x, scalar(alpha).expand(len(x), 1), grid, vocab)
        return one_hot(z, vocab.size).double().mean(1)

    alpha_s, alpha_t = 0.7, 0.3
    torch.testing.assert_close(measured(alpha_t), transitions(process.pi(vocab), alpha_t), rtol=0, atol=1e-4)
    composed = measured(alpha_s) @ measured(alpha_t / alpha_s)
    torch.testing.assert_close(composed, measured(alpha_t), rtol=0, atol=3e-4)
