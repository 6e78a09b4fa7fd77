from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unmask.diffusion.categorical import _GROUP_SIZE, SamplingParams, sample_inverse_cdf
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import LogLinear
from unmask.sampling import Ancestral
from unmask.sampling.canvas import Canvas
from unmask.types import Positions, RowFn, Times, Tokens, Vocab

BELOW_ONE = float(np.nextafter(1, 0))


# Drawing


@pytest.mark.parametrize("tokens", [1, 37, _GROUP_SIZE, _GROUP_SIZE + 1, 3 * _GROUP_SIZE, 3 * _GROUP_SIZE + 5, 50_257])
def test_draw_is_the_inverse_of_the_cumulative_sum(tokens: int) -> None:
    rng = np.random.default_rng(0)
    weights, u = rng.random((100, tokens)) ** 8, rng.random(100)
    expected = [
        int(np.searchsorted(w.cumsum(), v * w.cumsum()[-1], side="right")) for w, v in zip(weights, u, strict=True)
    ]
    assert sample_inverse_cdf(torch.from_numpy(weights), torch.from_numpy(u)).tolist() == expected


def test_draw_at_the_edges_of_the_cells() -> None:
    weights = torch.tensor([[1.0, 0.0, 1.0, 2.0, 0.0]]).expand(5, -1)
    u = torch.tensor([0.0, 0.25, 0.4999, 0.5, 1.0], dtype=torch.float64)
    assert sample_inverse_cdf(weights, u).tolist() == [0, 2, 2, 3, 3]


@settings(deadline=None, max_examples=300)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(0, 1), st.sampled_from([5e-324, 1e-300, 1e-17, 1e300])),
        min_size=1,
        max_size=12,
    ).filter(any),
    stretch=st.sampled_from([1, _GROUP_SIZE // 2, _GROUP_SIZE]),
    u=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 5e-324, BELOW_ONE, 1.0])),
)
def test_what_has_no_weight_is_never_drawn(weights: list[float], stretch: int, u: float) -> None:
    line = torch.zeros(1, stretch * len(weights), dtype=torch.float64)
    line[0, ::stretch] = torch.tensor(weights, dtype=torch.float64)
    index = int(sample_inverse_cdf(line, torch.tensor([u], dtype=torch.float64)))
    assert 0 <= index < line.shape[1]
    assert line[0, index] > 0


def test_sums_of_float32_weights_are_of_float64() -> None:
    """In float32 the small ones would be lost beside the first, and never drawn."""
    weights = torch.full((1, 4 * _GROUP_SIZE + 1), 1e-9)
    weights[0, 0] = 1
    u = torch.tensor([1 - 1e-9 / 2]).double()
    assert int(sample_inverse_cdf(weights, u)) == 4 * _GROUP_SIZE


@pytest.mark.parametrize(
    "line", [[0.0, 0.0, 0.0], [0.5, math.nan, 0.5], [math.inf, 1.0, 1.0]], ids=["zeros", "nan", "inf"]
)
def test_a_line_that_is_no_distribution_is_refused(line: list[float]) -> None:
    weights = torch.tensor([[0.2, 0.3, 0.5], line])  # one bad line among good ones
    with pytest.raises(ValueError, match="log-probabilities are NaN or give no token any probability"):
        sample_inverse_cdf(weights, torch.tensor([0.5, 0.5]).double())


def test_no_lines_no_tokens() -> None:
    assert sample_inverse_cdf(torch.zeros(0, 5), torch.zeros(0).double()).shape == (0,)


def test_frequencies_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 3.0, 1e-3, 1.5]).double()
    u = torch.rand(50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = torch.bincount(sample_inverse_cdf(weights.expand(len(u), -1), u), minlength=5)
    expected = weights / weights.sum() * len(u)
    assert counts[1] == 0
    drawn = weights > 0
    assert stats.chisquare(counts[drawn], expected[drawn]).pvalue > 1e-3


# Choosing


LINE = torch.tensor([[0.15, 0.5, 0.05, 0.3]])


def kept(choice: SamplingParams, p: Tensor = LINE) -> list[int]:
    return choice.probabilities(p.log())[0].nonzero()[:, 0].tolist()


def test_the_default_changes_nothing() -> None:
    torch.testing.assert_close(SamplingParams().probabilities(LINE.log()), LINE)


def test_temperature_zero_takes_the_most_probable() -> None:
    torch.testing.assert_close(
        SamplingParams(temperature=0).probabilities(LINE.log()), torch.tensor([[0, 1, 0, 0]]).double()
    )


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # top_k = 11 of 11 keeps everything, and keeps temperature 1 off the short cut
    weights = SamplingParams(temperature=temperature, top_k=11).probabilities(logits.log_softmax(-1))
    torch.testing.assert_close(weights, (logits / temperature).softmax(-1))


@pytest.mark.parametrize(("k", "expected"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_k(k: int, expected: list[int]) -> None:
    assert kept(SamplingParams(top_k=k)) == expected


def test_top_k_keeps_k_of_equals() -> None:
    """Logits in bfloat16 tie often, and a fresh network's all do."""
    assert len(kept(SamplingParams(top_k=2), torch.full((1, 6), 1 / 6))) == 2


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.1, [1]),  # less than the largest probability: `cumsum <= p` would keep nothing at all
        (0.5, [1]),  # reached exactly
        (0.6, [1, 3]),  # the 0.3 crosses 0.6: `cumsum <= p` would drop it
        (0.81, [0, 1, 3]),
        (0.96, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_token_that_crosses(p: float, expected: list[int]) -> None:
    exact = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64)
    assert kept(SamplingParams(top_p=p), exact) == expected


def test_what_is_kept_keeps_its_proportions() -> None:
    weights = SamplingParams(top_p=0.6).probabilities(LINE.log())
    torch.testing.assert_close(weights, torch.tensor([[0, 0.625, 0, 0.375]]).double(), rtol=1e-6, atol=0)


def test_temperature_comes_first_then_k_then_p() -> None:
    # At temperature 1/2 the line is proportional to its square: 0.0225, 0.25, 0.0025, 0.09. Of the top
    # three, 0.25 is 69 % and 0.09 crosses 0.9; without the temperature, or p first, 0.15 would be kept.
    assert kept(SamplingParams(temperature=0.5, top_k=3, top_p=0.9)) == [1, 3]
    # Of the top two, 0.5 is 62.5 % and reaches 0.6 alone; of all four it does not.
    assert kept(SamplingParams(top_k=2, top_p=0.6)) == [1]


@pytest.mark.parametrize(
    "choice",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.6),
        SamplingParams(2.0, 3, 0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("mass", [0.02, 0.7, 1.0, 1.8])
def test_the_mass_of_a_line_is_preserved(choice: SamplingParams, mass: float) -> None:
    """What a line's probabilities lack to one is the chance to stay masked: no filter may touch it."""
    weights = choice.probabilities((LINE.double() * mass).log())
    assert float(weights.sum()) == pytest.approx(mass, rel=1e-6)


def test_the_mask_is_never_chosen() -> None:
    log_x = torch.tensor([[0.25, 0.0, 0.75]]).log()
    for choice in (
        SamplingParams(),
        SamplingParams(temperature=5.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=1.0),
    ):
        assert float(choice.probabilities(log_x)[0, 1]) == 0


@pytest.mark.parametrize("temperature", [-0.5, math.inf, math.nan])
def test_a_temperature_below_zero_or_without_end_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"^temperature must be 0 .* finite number above; got {temperature}$"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("k", [0, -2])
def test_keeping_no_token_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"^top_k must keep at least 1 token; got {k}$"):
        SamplingParams(top_k=k)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.5, math.nan])
def test_a_top_p_that_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=f"^top_p must be above 0 and at most 1; got {p}$"):
        SamplingParams(top_p=p)


# A large vocabulary in many small steps


WORDS, STEPS = 50_000, 1000
MASK = WORDS
ZIPF = 1 / torch.arange(1, WORDS + 1, dtype=torch.float64)
ZIPF = ZIPF / ZIPF.sum()
NATS = -ZIPF.log()
ENTROPY = float((ZIPF * NATS).sum())
SPREAD = float((ZIPF * (NATS - ENTROPY) ** 2).sum().sqrt())
"""The standard deviation of -log p(token)."""


@dataclass
class ZipfModel:
    """Believes that every hidden word is drawn by its rank, whatever stands beside it."""

    vocab: Vocab = Vocab(WORDS + 1, MASK)
    process: Masking = Masking(LogLinear(eps=0))
    normalized: bool = True
    max_length: int | None = None
    time_independent: bool = True
    shift_logits: bool = False
    asked: list[tuple[float, int]] = field(default_factory=list)
    """The time of each asked sequence, and how many of its rows."""

    def __call__(
        self, z: Tokens, t: Times, positions: Positions, *rest: Any, row_fn: RowFn | None = None, **options: Any
    ) -> Tensor:
        sequence, _ = positions
        self.asked += zip(t[:, 0].tolist(), sequence.bincount(minlength=len(z)).tolist(), strict=True)
        line = torch.cat([ZIPF.log(), torch.tensor([-torch.inf])])
        lines = line.expand(len(sequence), -1)
        return lines if row_fn is None else row_fn(lines, slice(None))


def sigmas_of_entropy(words: Tensor) -> float:
    """By how many standard errors the words' mean -log p is off the entropy."""
    return (float(NATS[words].mean()) - ENTROPY) / (SPREAD / math.sqrt(len(words)))


def sigmas_of_count(count: int, trials: int, p: float) -> float:
    return (count - trials * p) / math.sqrt(trials * p * (1 - p))


def test_ancestral_sampling_draws_the_tail_and_keeps_the_pace() -> None:
    model, (rows, length) = ZipfModel(), (16, 128)
    *_, z = Ancestral(steps=STEPS).run(model, Canvas(torch.full((rows, length), MASK), tuple(range(rows))))
    assert bool((z != MASK).all())
    assert abs(sigmas_of_entropy(z.flatten())) < 4
    by_half_time = sum(asked for t, asked in model.asked if t > 0.5)
    assert sum(asked for _, asked in model.asked) == rows * length
    assert abs(sigmas_of_count(by_half_time, rows * length, 1 / 2)) < 4


# The same step as published code takes it, an exponential race in float32: token = argmax(q / -log(u)).
# For real numbers that is exact. But a float32 uniform is a multiple of 2^-24, so -log(u) is never below
# 6e-8, and a rare word cannot beat the mask however lucky it is.
#
# In a step of 1/1000 at t = 1/2 one position in 500 is revealed. A few thousand positions reveal about ten
# words, which proves nothing; a million would need 5 * 10^10 uniforms. But the mask is never slower than
# -log(2^-24), so a word can beat it only with a uniform within `REACH` steps of 1, which happens to
# one position in 30. Those uniforms alone are drawn, at their true rate; a first test shows that
# nothing is lost, and the same race on uniforms without a lattice is the control.

LATTICE = 2.0**-24
MOVE_T, MOVE_S = 0.5, 0.5 - 1 / STEPS
WORD_Q = ZIPF.float() * (MOVE_T - MOVE_S)
MASK_Q = torch.tensor(MOVE_S)
REACH = (WORD_Q / MASK_Q * -math.log(LATTICE) / LATTICE).double().ceil() + 1


def race(uniform: Tensor) -> Tensor:
    """The plain sampler, on uniforms [N, V + 1] of which the mask's is the last."""
    q = torch.cat([WORD_Q, MASK_Q[None]])
    return (q / -uniform.log()).argmax(-1)


def reveals(positions: Tensor, words: Tensor, uniform: Tensor, mask_uniform: Tensor) -> dict[int, int]:
    """What the race reveals at which position, from the `uniform` [n] of some words at some positions."""
    speed = WORD_Q[words] / -uniform.log()
    faster = (speed > (MASK_Q / -mask_uniform.log())[positions]).nonzero()[:, 0]
    order = faster[speed[faster].argsort()]  # the fastest last: it is the one that a position keeps
    return dict(zip(positions[order].tolist(), words[order].tolist(), strict=True))


def test_words_out_of_reach_never_win_the_race() -> None:
    uniform = torch.rand(200, WORDS + 1, generator=torch.Generator().manual_seed(2))
    assert bool((uniform[:10] % LATTICE == 0).all())
    uniform[:, MASK] = LATTICE  # the mask as slow as it can be: more words win, and from further off
    positions, words = (uniform[:, :MASK] >= (1 - REACH * LATTICE).float()).nonzero(as_tuple=True)
    revealed = reveals(positions, words, uniform[positions, words], uniform[:, MASK])
    assert len(revealed) > 3
    assert [revealed.get(position, MASK) for position in range(200)] == race(uniform).tolist()


def test_a_float32_race_loses_the_tail_and_the_pace() -> None:
    rng, total = np.random.default_rng(0), 1_000_000
    # With replacement: a word may come twice at one position, once in 10^5 positions, and changes nothing.
    words = torch.arange(WORDS).repeat_interleave(torch.from_numpy(rng.binomial(total, REACH * LATTICE)))
    positions = torch.from_numpy(rng.integers(total, size=len(words)))
    from_one = torch.from_numpy(1 - rng.random(len(words))) * REACH[words]  # in steps of the lattice
    mask_uniform = torch.from_numpy(rng.uniform(LATTICE, 1 - LATTICE, size=total))
    exact = 1 - from_one * LATTICE, mask_uniform
    on_lattice = (1 - from_one.ceil() * LATTICE).float(), ((mask_uniform / LATTICE).ceil() * LATTICE).float()
    sigmas = {}
    for name, uniforms in (("exact", exact), ("float32", on_lattice)):
        drawn = torch.tensor(list(reveals(positions, words, *uniforms).values()))
        sigmas[name] = sigmas_of_entropy(drawn), sigmas_of_count(len(drawn), total, 1 / (STEPS * MOVE_T))
    # What is seen: float32 reveals 1,504 positions where 2,000 are due (-11 sigma), and their words have 6.15
    # nats where the entropy is 7.56 (-17 sigma); of 50,000 ranks none above 11,384 appears. The control, on
    # the same draws, reveals 2,028 with 7.56 nats and up to rank 49,867.
    assert max(abs(sigma) for sigma in sigmas["exact"]) < 4
    assert max(sigmas["float32"]) < -4
