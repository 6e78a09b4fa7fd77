"""Options by name, as people write them, and checked when a sampler is made."""

from __future__ import annotations

import pytest

import tiny
from unmask import MDLM, Choice, LanguageModel
from unmask.sampling import (
    Ancestral,
    Autoregressive,
    Blockwise,
    Confidence,
    EntropyBounded,
    Factor,
    Remask,
    SemiAutoregressive,
    Threshold,
)
from unmask.sampling.blockwise import PrefixCache
from unmask.sampling.confidence import ORDERS, Margin
from unmask.sampling.remask import REMASKINGS, Cap, LeastSure, Loop


def test_a_name_is_the_object_of_that_name() -> None:
    assert Confidence(3, order="margin") == Confidence(3, order=Margin())
    assert Remask(3, remasking="cap", loop=True) == Remask(3, remasking=Cap(), loop=Loop())
    assert Remask(remasking="least_sure", loop=False) == Remask(remasking=LeastSure())
    assert Blockwise(4, "ancestral", "prefix") == Blockwise(4, Ancestral(), PrefixCache())
    assert SemiAutoregressive(sampler="confidence") == SemiAutoregressive(sampler=Confidence())
    lm = LanguageModel(tiny.denoiser(MDLM()))
    assert lm.sample(length=5, sampler="confidence").ids == lm.sample(length=5, sampler=Confidence()).ids


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_writes(name: str) -> None:
    lm = LanguageModel(tiny.denoiser(MDLM()))
    assert len(lm.sample(length=6, sampler=Confidence(3, order=name)).ids[0]) == 6


@pytest.mark.parametrize("name", REMASKINGS)
def test_every_remasking_writes(name: str) -> None:
    lm = LanguageModel(tiny.denoiser(MDLM()))
    assert len(lm.sample(length=6, sampler=Remask(9, remasking=name, loop=True)).ids[0]) == 6


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Confidence(order="margn"), r"there is no order 'margn' \(did you mean margin\?\)"),
        (lambda: Confidence(order=3), 'the order must be "probability" or "margin" or "entropy"'),
        (lambda: Remask(remasking="foo"), "there is no remasking 'foo'; there are cap, rescale, least-sure"),
        (lambda: Remask(loop="yes"), "the loop must be a Loop, True or None; got 'yes'"),
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
            lambda: Autoregressive(Choice(float("inf"))),
            "temperature must be 0 .* or a finite number above; got inf",
        ),
        (lambda: Choice("hot"), "temperature .*; got 'hot'"),
        (lambda: Choice(top_p="x"), "top_p .*; got 'x'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=sentence):
        make()
