"""What every sampler promises, on every model it fits: parametrised over the unions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from unmask import SamplingParams
from unmask.objectives import Objective
from unmask.sampling import Blockwise, Sampler, SemiAutoregressive
from unmask.sampling.canvas import Canvas

pytestmark = pytest.mark.thorough

PAIRS = [
    pytest.param(sampler, kind(), id=f"{i}-{type(sampler).__name__}-{kind.__name__}")
    for i, (sampler, kind) in enumerate(itertools.product(tiny_models.all_samplers(), tiny_models.OBJECTIVES))
    if tiny_models.is_compatible(sampler, kind())
]

canvases = st.integers(1, tiny_models.LENGTH).flatmap(
    lambda length: st.lists(
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, 4, 4, 5, 6]), min_size=length, max_size=length),
        min_size=1,
        max_size=4,
    )
)


def last(sampler: Sampler, objective: Objective, canvas: Canvas, timed: bool = False) -> torch.Tensor:
    z = canvas.tokens
    for z in sampler.run(tiny_models.tiny_denoiser(objective, time_conditioned=timed), canvas):  # noqa: B007
        pass
    return z


@pytest.mark.parametrize(("sampler", "objective"), PAIRS)
@settings(max_examples=10, deadline=None)
@given(rows=canvases, seed=st.integers(0, 2**40), timed=st.booleans())
def test_every_hole_is_filled_and_nothing_else_changes(
    sampler: Sampler, objective: Objective, rows: list[list[int]], seed: int, timed: bool
) -> None:
    mask = 4
    tokens = torch.tensor(rows)
    canvas = Canvas(tokens.clone(), tuple(seed + i for i in range(len(rows))))
    fixed = tokens != mask
    result = tokens
    for result in sampler.run(tiny_models.tiny_denoiser(objective, time_conditioned=timed), canvas):
        assert torch.equal(result[fixed], tokens[fixed])
    assert objective.process.inserts_tokens or not (result == mask).any()
    assert torch.equal(canvas.tokens, tokens), "the caller's canvas is not written on"


@pytest.mark.parametrize(("sampler", "objective"), PAIRS)
@settings(max_examples=6, deadline=None)
@given(rows=canvases, seed=st.integers(0, 2**40))
def test_a_row_is_the_same_alone_and_in_any_batch(
    sampler: Sampler, objective: Objective, rows: list[list[int]], seed: int
) -> None:
    tokens = torch.tensor(rows)
    seeds = tuple(seed + 7 * i for i in range(len(rows)))
    together = last(sampler, objective, Canvas(tokens, seeds))
    for i in reversed(range(len(rows))):
        alone = last(sampler, objective, Canvas(tokens[i : i + 1], seeds[i : i + 1]))
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize(("sampler", "objective"), PAIRS)
def test_seeds_decide(sampler: Sampler, objective: Objective) -> None:
    blank = torch.full((4, tiny_models.LENGTH), 4)
    first = last(sampler, objective, Canvas(blank, (0, 1, 2, 3)))
    again = last(sampler, objective, Canvas(blank, (0, 1, 2, 3)))
    other = last(sampler, objective, Canvas(blank, (4, 5, 6, 7)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 4


@pytest.mark.parametrize(("sampler", "objective"), PAIRS)
def test_every_sampler_heeds_its_choice(sampler: Sampler, objective: Objective) -> None:
    """With top_k = 1, as with temperature 0, the most probable token is written; else others, too."""
    if sampler.inner is None and not hasattr(sampler, "params"):
        with pytest.raises(ValueError, match="has no temperature, top_k or top_p: leave them out"):
            sampler.with_params(SamplingParams(top_k=1), type(sampler).__name__)
        return

    def chosen(choice: SamplingParams) -> torch.Tensor:
        if isinstance(sampler, SemiAutoregressive | Blockwise):
            altered: Sampler = replace(sampler, sampler=replace(sampler.sampler, params=choice))
        else:
            altered = replace(sampler, params=choice)
        return last(altered, objective, Canvas(torch.full((3, tiny_models.LENGTH), 4), (0, 1, 2)))

    cold, narrow, warm = (
        chosen(SamplingParams(temperature=0)),
        chosen(SamplingParams(top_k=1)),
        chosen(SamplingParams()),
    )
    assert torch.equal(cold, narrow)
    assert not torch.equal(cold, warm)
