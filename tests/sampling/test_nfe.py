"""How often the network is called, and how many rows its head answers: counted, not promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny_models
from unmask import D3PM, MDLM, SEDD, Batch, NextToken
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Cosine, LogLinear
from unmask.objectives import Objective
from unmask.reproduce._tables.caching import _with_cache, _without_cache
from unmask.sampling import (
    Ancestral,
    Autoregressive,
    Confidence,
    EntropyBounded,
    FirstHitting,
    RandomOrder,
    Sampler,
    SemiAutoregressive,
    Threshold,
)
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser
from unmask.types import Queries

MASK = 4
PARTLY = torch.tensor([[0, 4, 4, 1, 4, 4, 4, 2], [4, 4, 3, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1]])


def count(sampler: Sampler, objective: Objective, tokens: Tensor, length: int = 12) -> CountingDenoiser:
    counted = CountingDenoiser(tiny_models.tiny_denoiser(objective, length=length))
    for _ in sampler.run(counted, Canvas(tokens, tuple(range(len(tokens))))):
        pass
    return counted


@pytest.mark.parametrize("sampler", [Ancestral(1000), Ancestral(3), FirstHitting(), RandomOrder(1000)])
@pytest.mark.parametrize("objective", [MDLM(), MDLM(schedule=Cosine())], ids=["loglinear", "cosine"])
def test_the_head_sees_each_position_once(sampler: Sampler, objective: MDLM) -> None:
    assert count(sampler, objective, PARTLY).num_queries == 7
    assert count(sampler, objective, torch.full((5, 12), MASK)).num_queries == 60


@pytest.mark.parametrize(
    "sampler",
    [Ancestral(1000), RandomOrder(1000), Confidence(steps=1000), FirstHitting(), Threshold(threshold=1.0)],
    ids=lambda s: type(s).__name__,
)
def test_more_steps_than_positions_cost_no_more_calls_than_positions(sampler: Sampler) -> None:
    counted = count(sampler, MDLM(), PARTLY)
    assert counted.nfe <= 5  # the longest row has five holes
    assert counted.num_sequences <= 5 + 2  # and each row is in no more calls than it has holes
    assert count(sampler, MDLM(), torch.full((8, 12), MASK)).nfe <= 12


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("kind", [Ancestral, RandomOrder])
def test_no_more_calls_than_steps(kind: type[Ancestral] | type[RandomOrder], steps: int) -> None:
    assert count(kind(steps), MDLM(), torch.full((8, 12), MASK)).nfe <= steps
    assert count(Confidence(steps=steps), MDLM(), torch.full((8, 12), MASK)).nfe == steps


def test_a_row_costs_only_the_steps_in_which_it_reveals_something() -> None:
    """Each row takes part in exactly as many calls as it has different reveal steps."""
    tokens, steps = torch.full((16, 12), MASK), 20
    visible = alpha_grid(LogLinear(), steps).flip(0)
    drawn = torch.searchsorted(visible, seeded_uniform(range(16), 12), right=True)
    own = [len(set(row)) for row in drawn.tolist()]
    counted = count(Ancestral(steps), MDLM(), tokens)
    assert counted.num_sequences == sum(own)
    assert counted.nfe == max(own)


def test_rows_of_different_times_share_a_call() -> None:
    times: list[Tensor] = []
    model = tiny_models.tiny_denoiser(MDLM())

    class Watched(CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Tensor, *rest: object, **options: object) -> Tensor:  # type: ignore[override]
            times.append(t[:, 0])
            return super().__call__(z, t, positions, *rest, **options)

    for _ in Ancestral(50).run(Watched(model), Canvas(torch.full((6, 12), MASK), tuple(range(6)))):
        pass
    assert any(len(set(t.tolist())) > 1 for t in times)
    grid = torch.cat(times).double() * 50
    torch.testing.assert_close(grid, grid.round())


def test_nothing_to_do_costs_nothing() -> None:
    full = torch.ones(2, 5, dtype=torch.int64)
    for sampler in tiny_models.all_samplers():
        if tiny_models.is_compatible(sampler, MDLM()):
            assert count(sampler, MDLM(), full).nfe == 0, sampler
    assert count(Autoregressive(), NextToken(), full).nfe == 0


def test_free_models_are_called_at_every_step_unless_their_answer_still_holds() -> None:
    """D3PM's answer changes with the time; SEDD's, without time conditioning, only with the text."""
    blank = torch.full((3, 12), MASK)
    assert count(Ancestral(60), D3PM(), blank).nfe > 30
    assert count(Ancestral(1000), SEDD(), blank).nfe <= 36
    for row in range(3):
        assert count(Ancestral(1000), SEDD(), blank[row : row + 1]).nfe <= 12


def test_the_papers_cache_saves_calls_and_changes_no_text() -> None:
    """Algorithm 1 calls a network without time conditioning again only where a token has changed."""
    canvas, found = Canvas(torch.full((3, 12), MASK), (0, 1, 2)), {}
    for way in (_without_cache, _with_cache):
        counted = CountingDenoiser(tiny_models.tiny_denoiser(MDLM()))
        *_, z = way(Ancestral(60), counted, canvas)
        found[way] = z, counted.nfe
    assert torch.equal(found[_with_cache][0], found[_without_cache][0])
    assert found[_with_cache][1] <= 36 < 50 < found[_without_cache][1] <= 60


@pytest.mark.parametrize(
    "sampler",
    [RandomOrder(4), Confidence(steps=4), Threshold(threshold=1.0), EntropyBounded(entropy_bound=0.0)],
    ids=lambda s: type(s).__name__,
)
def test_the_network_is_told_the_noise_level_it_sees(sampler: Sampler) -> None:
    """1 - alpha(t) is the share of the row's holes that are still open."""
    told: list[tuple[float, float]] = []
    objective = MDLM(schedule=Cosine(eps=0.0))

    class Watched(CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Tensor, *rest: object, **options: object) -> Tensor:  # type: ignore[override]
            told.append((float(t[0]), float((z[0] == MASK).sum() / 8)))
            return super().__call__(z, t, positions, *rest, **options)

    canvas = Canvas(torch.tensor([[0, 1, 2, 3, *[MASK] * 8]]), (0,))
    for _ in sampler.run(Watched(tiny_models.tiny_denoiser(objective)), canvas):
        pass
    for t, open_share in told:
        alpha = objective.schedule.alpha(torch.tensor(t, dtype=torch.float64))
        assert abs(1 - float(alpha) - open_share) < 1e-6
    assert len({t for t, _ in told}) == len(told) > 3


def test_parallel_decoding_saves_calls_when_the_network_is_sure() -> None:
    blank = torch.full((2, 12), MASK)
    assert count(Threshold(threshold=0.0), MDLM(), blank).nfe == 1
    assert count(EntropyBounded(entropy_bound=100.0), MDLM(), blank).nfe == 1
    assert count(EntropyBounded(entropy_bound=0.0), MDLM(), blank).nfe == 12


def test_autoregression_reads_each_token_once() -> None:
    """With the key-value cache, the tokens that pass through the network are those of the text."""
    read: list[int] = []

    class Watched(CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Tensor, *rest: object, **options: object) -> Tensor:  # type: ignore[override]
            read.append(z.shape[1])
            return super().__call__(z, t, positions, *rest, **options)

    tokens = torch.tensor([[0, 1, 2, 4, 4, 4], [3, 1, 4, 4, 0, 4]])
    counted = Watched(tiny_models.tiny_denoiser(NextToken()))
    for _ in Autoregressive().run(counted, Canvas(tokens, (0, 1))):
        pass
    assert read == [3, 1, 1, 1]  # the prompt at once, then token by token
    assert counted.num_queries == 6


def test_semi_autoregressive_writes_each_position_once() -> None:
    counted = count(SemiAutoregressive(4, 12, Ancestral(6)), MDLM(), torch.full((2, 30), MASK))
    assert counted.num_queries == 60


@pytest.mark.parametrize("objective", [MDLM(), MDLM(steps=10), SEDD()], ids=["mdlm", "steps", "sedd"])
def test_training_asks_at_masked_rows_only(objective: MDLM | SEDD) -> None:
    class Watched(CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Queries, *rest: object, **options: object) -> Tensor:  # type: ignore[override]
            assert torch.equal(positions.mask(), z == MASK)
            return super().__call__(z, t, positions, *rest, **options)

    counted = Watched(tiny_models.tiny_denoiser(objective))
    assert isinstance(counted.process, Masking)
    x = torch.tensor([[0, 1, 2, 3, 5, 6, 0, 1, 2, 3, 5, 6]]).expand(40, -1)
    nats = objective.token_nll(counted, Batch(x), torch.Generator().manual_seed(0))
    assert counted.nfe == 1
    assert counted.num_queries == int((nats != 0).sum())
    assert 0.35 < counted.num_queries / x.numel() < 0.65  # half of the tokens, on average
