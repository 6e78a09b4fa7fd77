"""Texts longer than the model: whatever asks for them, windows around their holes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny_models
import unmask
from unmask import MDLM, LanguageModel, Tokenizer
from unmask.guidance import Guidance
from unmask.objectives import BlockDiffusion, NextToken, Objective, UniformDiffusion
from unmask.sampling import SAMPLERS, Blockwise, Sampler, SemiAutoregressive
from unmask.sampling.factory import make_sampler
from unmask.sampling.windows import _windows_around_holes, strided_windows

pytestmark = pytest.mark.thorough

MASK = 4
OBJECTIVES: list[Objective] = [MDLM(), NextToken(), UniformDiffusion(), BlockDiffusion(block_size=4)]


def model(objective: Objective) -> LanguageModel:
    return LanguageModel(tiny_models.tiny_denoiser(objective))


def canvas(*holes: tuple[int, int], length: int) -> torch.Tensor:
    ids = torch.arange(length) % 4
    for first, last in holes:
        ids[first:last] = MASK
    return ids


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 12), st.booleans())
def test_windows_fill_every_hole_once_and_from_left_to_right(hidden: list[bool], window: int, ahead: bool) -> None:
    left = list(hidden)
    last_written = -1
    for inside in _windows_around_holes(hidden, window, bidirectional=ahead):
        assert 0 <= inside.start < inside.stop <= len(hidden)
        assert inside.stop - inside.start <= window
        here = [place for place in range(inside.start, min(inside.stop, len(left))) if left[place]]
        if here:
            assert here[0] > last_written
            last_written = here[-1]
        for place in here:
            left[place] = False
    assert not any(left)


def test_a_hole_sees_as_much_as_fits_on_both_sides() -> None:
    hidden = [100 <= place < 104 for place in range(300)]
    assert _windows_around_holes(hidden, 64) == [slice(70, 134)]
    assert _windows_around_holes(hidden, 64, bidirectional=False) == [slice(40, 104)]  # where one cannot look ahead
    at_the_start = [place == 1 for place in range(300)]
    assert _windows_around_holes(at_the_start, 64) == [slice(0, 64)]
    at_the_end = [place == 298 for place in range(300)]
    assert _windows_around_holes(at_the_end, 64) == [slice(236, 300)]
    together = [place in (100, 120) for place in range(300)]
    assert _windows_around_holes(together, 64) == [slice(78, 142)]
    apart = [place in (100, 180) for place in range(300)]
    assert [(w.start <= 100 < w.stop, w.start <= 180 < w.stop) for w in _windows_around_holes(apart, 64)] == [
        (True, False),
        (False, True),
    ]
    longer_than_the_window = [100 <= place < 250 for place in range(300)]
    assert _windows_around_holes(longer_than_the_window, 64)[:2] == [slice(68, 132), slice(100, 164)]
    assert _windows_around_holes([place >= 10 for place in range(300)], 64) == strided_windows(300, 64, 32)


@pytest.mark.parametrize("name", SAMPLERS)
def test_long_samples_are_those_of_sliding_windows(name: str) -> None:
    """Of half a window each, as the command line has always written them."""
    lm = model(MDLM())
    inner = make_sampler(lm.denoiser, name, 3)
    sliding = SemiAutoregressive(stride=tiny_models.LENGTH // 2, sampler=inner)  # type: ignore[arg-type]
    for prompt in ([], [1, 2, 3], [1] * 20):
        expected = lm.sample(2, 31, prompt=prompt, sampler=sliding, seed=5).ids
        assert lm.sample(2, 31, prompt=prompt, sampler=inner, seed=5).ids == expected


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_long_templates_are_filled_and_keep_what_is_given(objective: Objective) -> None:
    lm = model(objective)
    for holes in ([(3, 5), (30, 31)], [(20, 37)], [(0, 2), (4, 6), (18, 19), (39, 40)], [(5, 40)]):
        template = canvas(*holes, length=40)
        filled = lm.infill(template, n=2, seed=3).tokens
        given_places = template != MASK
        assert not bool((filled == MASK).any())
        assert torch.equal(filled[:, given_places], template[given_places].expand(2, -1))
        alone = lm.infill(template, n=1, seed=4).tokens
        assert torch.equal(alone[0], filled[1])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_prompts_of_any_lengths_are_gone_on_from_as_if_alone(objective: Objective) -> None:
    lm = model(objective)
    prompts = [[1, 2, 3] * 8, [2], [3, 1] * 3]
    together = lm.complete(prompts, 15, seed=2).ids
    for number, prompt in enumerate(prompts):
        assert together[number] == lm.complete([prompt], 15, seed=2 + number).ids[0]
        assert len(together[number]) == 15


@pytest.mark.parametrize("sampler", [Blockwise(4), Blockwise(5, "ancestral", "prefix"), Blockwise(3, cache="dual")])
def test_blocks_go_on_beyond_the_model(sampler: Sampler) -> None:
    lm = model(MDLM())
    for template in (canvas((2, 40), length=40), canvas((15, 22), (38, 39), length=40)):
        filled = lm.infill(template, sampler=sampler).tokens[0]
        assert not bool((filled == MASK).any())
        assert torch.equal(filled[template != MASK], template[template != MASK])


def test_a_text_that_stops_is_at_an_end_in_all_windows() -> None:
    lm = model(MDLM())
    filled = lm.infill(canvas((1, 60), length=60), sampler=Blockwise(2, end_ids=(3,))).ids[0]
    assert 3 in filled[1:]
    first = filled.index(3, 1)
    assert set(filled[first:]) == {3}


def test_texts_that_fit_are_what_the_sampler_alone_writes() -> None:
    lm = model(MDLM())
    template = canvas((2, 5), (8, 12), length=tiny_models.LENGTH)[None]
    sampler = unmask.Ancestral(4)
    *_, last = sampler.run(lm.denoiser, unmask.sampling.canvas.Canvas(template, (7,)))
    assert torch.equal(lm.generate(template, sampler, 7).tokens, last)


def test_patterns_hold_in_windows() -> None:
    tokenizer = Tokenizer.characters("ab12")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=16, dropout=0.0)
        lm = LanguageModel.from_config(backbone, MDLM(), tokenizer)
    template = "ab" * 6 + "<mask:3>" + "ba" * 15 + "<mask:2>" + "a"
    for seed in range(3):
        text = lm.infill(template, guidance=Guidance(regex=("[12]+", "b*")), seed=seed).text
        assert re.fullmatch("(ab){6}[12]{3}(ba){15}bba", text)
        text = lm.infill(template, guidance=Guidance(1.5, "[ab]+"), seed=seed).text
        assert re.fullmatch("(ab){6}[ab]{3}(ba){15}[ab]{2}a", text)
    with pytest.raises(ValueError, match=r"one per hole \(2\); got 3"):
        lm.infill(template, guidance=Guidance(regex=("1", "1", "1")))
    with pytest.raises(ValueError, match="make it shorter"):
        lm.infill("<mask:40>a", guidance=Guidance(regex="[12]+"))
