from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unmask.diffusion.noise import derive_seed, seeded_uniform

SEEDS = st.integers(0, 2**64 - 1)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@settings(deadline=None, max_examples=50)
@given(
    seeds=st.lists(SEEDS, min_size=1, max_size=6),
    draw=st.integers(0, 10_000),
    size=st.integers(1, 40),
    longer=st.integers(0, 40),
)
def test_a_row_depends_on_its_seed_and_draw_only(seeds: list[int], draw: int, size: int, longer: int) -> None:
    together = seeded_uniform(seeds, size + longer, draw)
    for row, seed in enumerate(seeds):
        assert torch.equal(seeded_uniform([seed], size, draw)[0], together[row, :size])


def test_shape_type_and_range() -> None:
    u = seeded_uniform([0, 1, 2**64 - 1], 1000)
    assert u.shape == (3, 1000)
    assert u.dtype == torch.float64
    assert u.min() >= 0
    assert u.max() < 1
    assert seeded_uniform([], 4).shape == (0, 4)


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, other=SEEDS, draw=st.integers(0, 1000), stream=st.integers(1, 1000))
def test_other_seeds_draws_and_streams_give_other_noise(seed: int, other: int, draw: int, stream: int) -> None:
    here = seeded_uniform([seed], 4, draw)
    others = {derive_seed(seed, stream), derive_seed(seed, stream + 1), other} - {seed}
    assert not bool((seeded_uniform(sorted(others), 4, draw) == here).any())
    assert not bool((seeded_uniform([seed], 4, draw + 1) == here).any())


def test_draws_do_not_overlap() -> None:
    """A draw is a counter of its own: no value of one long draw comes back in the next."""
    u = torch.cat([seeded_uniform([3, derive_seed(3, 1)], 20_000, draw) for draw in range(3)])
    assert len(u.unique()) == u.numel()


@given(seed=SEEDS)
def test_stream_zero_is_the_seed_itself(seed: int) -> None:
    assert derive_seed(seed, 0) == seed


@given(seed=SEEDS, other=SEEDS, stream=st.integers(0, 1000), another=st.integers(0, 1000))
def test_streams_of_all_seeds_are_told_apart(seed: int, other: int, stream: int, another: int) -> None:
    same = (seed, stream) == (other, another)
    assert (derive_seed(seed, stream) == derive_seed(other, another)) == same


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, derive_seed(1, 7)])
def test_values_are_uniform(seed: int) -> None:
    assert stats.kstest(seeded_uniform([seed], 20_000)[0].numpy(), "uniform").pvalue > 1e-3


def test_first_values_of_consecutive_seeds_are_uniform() -> None:
    """What a batch of short requests with seeds 0, 1, 2, ... gets."""
    assert stats.kstest(seeded_uniform(range(5000), 1)[:, 0].numpy(), "uniform").pvalue > 1e-3


def test_neighbours_are_uncorrelated() -> None:
    rows, size = 101, 2000
    bound = 4 / ((rows - 1) * size) ** 0.5  # four standard errors of a correlation that is zero
    by_seed = seeded_uniform(range(rows), size)
    by_draw = torch.cat([seeded_uniform([9], size, draw) for draw in range(rows)])
    by_stream = seeded_uniform([derive_seed(9, stream) for stream in range(rows)], size)
    for u in (by_seed, by_draw, by_stream):
        assert abs(correlation(u[:-1], u[1:])) < bound
        assert abs(correlation(u[:, :-1], u[:, 1:])) < bound
