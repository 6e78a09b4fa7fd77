"""Prompts of different lengths in one batch: each is gone on from as if it were alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from unmask import MDLM, SEDD, BlockDiffusion, Denoiser, LanguageModel, ModelConfig, NextToken, Vocab
from unmask.objectives import Objective
from unmask.sampling import (
    Ancestral,
    Blockwise,
    Confidence,
    RandomOrder,
    ReMDM,
    Sampler,
    SemiAutoregressive,
)
from unmask.sampling.blockwise import DualCache, PrefixCache
from unmask.sampling.canvas import prompt_canvas

MASK = 4
SAMPLERS: dict[str, tuple[Objective, Sampler | None]] = {
    "default": (MDLM(), None),
    "ancestral": (MDLM(), Ancestral(steps=4)),
    "remdm": (MDLM(), ReMDM(steps=5)),
    "confidence": (MDLM(), Confidence(steps=3)),
    "in blocks": (MDLM(), Blockwise(3, RandomOrder(steps=2))),
    "prefix cache": (MDLM(), Blockwise(3, Confidence(steps=2), PrefixCache())),
    "dual cache": (MDLM(), Blockwise(2, Confidence(steps=2), DualCache())),
    "SEDD": (SEDD(), Ancestral(steps=4)),
    "block diffusion": (BlockDiffusion(block_size=3), None),
    "blocks of one": (BlockDiffusion(block_size=1), None),
}


@pytest.mark.parametrize(("objective", "sampler"), SAMPLERS.values(), ids=list(SAMPLERS))
@pytest.mark.parametrize("timed", [False, True], ids=["timeless", "timed"])
def test_prompts_of_different_lengths_are_gone_on_from_as_alone(
    objective: Objective, sampler: Sampler | None, timed: bool
) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(objective, time_conditioned=timed, length=16))
    prompts = [[1, 2, 3, 5, 6, 0, 1], [2], [], [5, 5, 5, 5], [0, 1, 2, 3, 5]]
    together = lm.complete(prompts, 6, sampler=sampler, seed=7)
    assert [len(row) for row in together.ids] == [6] * 5
    assert not bool((together.tokens == MASK).any())
    for number, prompt in enumerate(prompts):
        alone = lm.complete([prompt], 6, sampler=sampler, seed=7 + number)
        assert alone.ids[0] == together.ids[number]


def test_without_a_prompt_the_default_is_to_sample() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    assert lm.complete([[]], 12, seed=3).ids == lm.sample(length=12, seed=3).ids


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    length=st.integers(1, 5),
    block=st.one_of(st.none(), st.integers(1, 5)),
)
def test_what_is_written_begins_together(lengths: list[int], length: int, block: int | None) -> None:
    tokens, valid = prompt_canvas([[1] * n for n in lengths], length, MASK, block)
    for row, n in enumerate(lengths):
        text = tokens[row][valid[row]]
        assert text.tolist() == [1] * n + [MASK] * length
        (first,) = valid[row].nonzero()[:1, 0].tolist()
        assert bool(valid[row, first : first + n + length].all())
        if block is None:
            assert int((tokens[row] == MASK).int().argmax()) == max(lengths)
        else:  # blocks begin with the text, and the first one to be written has the same number in all rows
            assert first % block == 0
            assert (first + n) // block == max(lengths) // block
    assert not bool((tokens[~valid] == MASK).any())


def test_texts_end_where_they_end() -> None:
    denoise = tiny_models.tiny_denoiser(MDLM())
    lm = LanguageModel(denoise)
    free = lm.complete([[1, 2]] * 8, 10, seed=1)
    ending = LanguageModel(_with_end(3))
    ended = ending.complete([[1, 2]] * 8, 10, seed=1)
    for row, whole in zip(ended.ids, free.ids, strict=True):
        assert row == (whole[: whole.index(3)] if 3 in whole else whole)
    assert any(len(row) < 10 for row in ended.ids)


def _with_end(end: int) -> Denoiser:
    other = tiny_models.tiny_denoiser(MDLM())
    config = ModelConfig(Vocab(7, MASK, end), other.config.backbone, MDLM())
    model = config.build().double().eval()
    model.load_state_dict(other.state_dict())
    return model


def test_what_cannot_be_gone_on_from_is_said() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    for prompts, length, words in (
        ([], 3, "no prompt"),
        ([[1]], 0, "must be at least 1; got 0"),
        ("12", 3, "prompts are a list"),
    ):
        with pytest.raises(ValueError, match=words):
            lm.complete(prompts, length)  # type: ignore[arg-type]
    window = tiny_models.tiny_denoiser(MDLM()).max_length
    assert window is not None
    sliding = SemiAutoregressive(stride=1, sampler=Ancestral(2))
    assert len(lm.complete([[1, 2], [1, 2]], window, sampler=sliding).ids) == 2
    left_to_right = LanguageModel(tiny_models.tiny_denoiser(NextToken()))
    assert len(left_to_right.complete([[1], [2]], 3).ids) == 2
    assert torch.equal(
        left_to_right.complete([[1], [2]], 3).tokens,
        left_to_right.generate(torch.tensor([[1, MASK, MASK, MASK], [2, MASK, MASK, MASK]])).tokens,
    )
