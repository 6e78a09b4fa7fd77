"""Options by name, as people write them, and checked when a sampler is made."""

from __future__ import annotations

import pytest

import tiny_models
from unmask import MDLM, LanguageModel, SamplingParams
from unmask.sampling import (
    Ancestral,
    Autoregressive,
    Blockwise,
    Confidence,
    EntropyBounded,
    Factor,
    ReMDM,
    SemiAutoregressive,
    Threshold,
)
from unmask.sampling.blockwise import PrefixCache
from unmask.sampling.confidence import CONFIDENCE_MEASURES, Margin
from unmask.sampling.remdm import REMASKING_SCHEDULES, Cap, Conf, Loop


def test_a_name_is_the_object_of_that_name() -> None:
    assert Confidence(3, measure="margin") == Confidence(3, measure=Margin())
    assert ReMDM(3, remasking="cap", loop=True) == ReMDM(3, remasking=Cap(), loop=Loop())
    assert ReMDM(remasking="conf", loop=False) == ReMDM(remasking=Conf())
    assert Blockwise(4, "ancestral", "prefix") == Blockwise(4, Ancestral(), PrefixCache())
    assert SemiAutoregressive(sampler="confidence") == SemiAutoregressive(sampler=Confidence())
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    assert lm.sample(length=5, sampler="confidence").ids == lm.sample(length=5, sampler=Confidence()).ids


@pytest.mark.parametrize("name", CONFIDENCE_MEASURES)
def test_every_order_writes(name: str) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    assert len(lm.sample(length=6, sampler=Confidence(3, measure=name)).ids[0]) == 6


@pytest.mark.parametrize("name", REMASKING_SCHEDULES)
def test_every_remasking_writes(name: str) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    assert len(lm.sample(length=6, sampler=ReMDM(9, remasking=name, loop=True)).ids[0]) == 6


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Confidence(measure="margn"), r"there is no measure 'margn' \(did you mean margin\?\)"),
        (
            lambda: Confidence(measure=3),
            'the measure must be "probability" or "best-probability" or "margin" or "entropy"',
        ),
        (lambda: ReMDM(remasking="foo"), "there is no remasking 'foo'; there are cap, rescale, conf"),
        (lambda: ReMDM(loop="yes"), "the loop must be a Loop, True or None; got 'yes'"),
        (
            lambda: Blockwise(4, "confidense"),
            r"there is no sampler 'confidense' \(did you mean confidence\?\)",
        ),
        (lambda: Blockwise(4, cache="prefx"), r"there is no cache 'prefx' \(did you mean prefix\?\)"),
        (lambda: Blockwise("4"), "a block must have at least 1 token; got '4'"),
        (lambda: Ancestral("8"), "steps must be a whole number; got '8', a str"),
        (lambda: Ancestral(10**20), "steps must be a whole number from 1 to 1,048,576; got 100,000,000,"),
        (lambda: Threshold("0.9"), "the threshold is a probability in .*; got '0.9'"),
        (lambda: Factor("1"), "got '1'"),
        (lambda: EntropyBounded(None), "got None"),
        (lambda: Cap("x"), "got 'x'"),
        (lambda: SemiAutoregressive(stride="4"), "stride must be at least 1; got '4'"),
        (
            lambda: Autoregressive(SamplingParams(float("inf"))),
            "temperature must be 0 .* or a finite number above; got inf",
        ),
        (lambda: SamplingParams("hot"), "temperature .*; got 'hot'"),
        (lambda: SamplingParams(top_p="x"), "top_p .*; got 'x'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=sentence):
        make()
