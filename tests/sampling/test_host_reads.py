"""A network call of a sampler, with all that the sampler does around it, reads at most one value from the device.

Most samplers plan on the host and read nothing between calls. Threshold, Factor and EntropyBounded decide from the
scores how many tokens they keep, ReMDM with `Conf` decides from the probabilities which tokens it remasks, and
Ancestral on a model that is not normalized, as UniformAncestral, looks at its tokens: these read one value (a small
tensor) per call. Where blocks may end a text, its end is looked for once per block.

`host_reads.py` says what counts: reads of CPU random numbers, and checks that ask a CPU only (`_assert_async`), do not.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import tiny_models
from host_reads import HostReads, host_reads
from unmask import MDLM, BlockDiffusion, NextToken, Objective
from unmask.sampling import (
    Ancestral,
    Autoregressive,
    Blockwise,
    Confidence,
    FirstHitting,
    RandomOrder,
    ReMDM,
    Sampler,
    SemiAutoregressive,
    Threshold,
)
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser

MASK, LENGTH = 4, 40
AT_START = 4
"""Values that are read once per run: the canvas is validated, and its masked positions are found."""

PAIRS = [
    pytest.param(sampler, kind(), timed, id=f"{i}-{type(sampler).__name__}-{kind.__name__}-{timed}")
    for i, (sampler, kind, timed) in enumerate(
        itertools.product(
            [*tiny_models.all_samplers(), ReMDM(steps=32, remasking="conf"), Blockwise(7, Threshold())],
            tiny_models.OBJECTIVES,
            [False, True],
        )
    )
    if tiny_models.is_compatible(sampler, kind())
]

PLANNED: list[tuple[Sampler, Objective]] = [
    (Ancestral(steps=32), MDLM()),
    (FirstHitting(), MDLM()),
    (RandomOrder(steps=32), MDLM()),
    (Confidence(steps=32), MDLM()),
    (ReMDM(steps=32), MDLM()),
    (SemiAutoregressive(stride=10, window=20, sampler=Confidence(steps=8)), MDLM()),
    *(
        (Blockwise(block_size=10, sampler=Confidence(steps=8), cache=cache), MDLM())
        for cache in ("none", "prefix", "dual")
    ),
    (Blockwise(sampler=Confidence(steps=8)), BlockDiffusion(block_size=10)),
    (Autoregressive(), NextToken()),
]


def count(sampler: Sampler, objective: Objective, timed: bool = False) -> tuple[HostReads, int]:
    """The reads of a run, and its network calls: texts with holes in different positions.

    A step that has changed nothing makes no call, if the network does not depend on the time, but counts as one.
    """
    tokens = torch.full((3, LENGTH), MASK)
    tokens[1, 7:20] = 1
    denoiser = CountingDenoiser(tiny_models.tiny_denoiser(objective, time_conditioned=timed, length=LENGTH))
    with torch.inference_mode(), host_reads() as reads:
        steps = sum(1 for _ in sampler.run(denoiser, Canvas(tokens, (0, 1, 2))))
    return reads, max(denoiser.nfe, steps)


@pytest.mark.parametrize(("sampler", "objective", "timed"), PAIRS)
def test_a_call_reads_at_most_one_value(sampler: Sampler, objective: Objective, timed: bool) -> None:
    reads, calls = count(sampler, objective, timed)
    assert reads.total <= calls + AT_START, reads


@pytest.mark.parametrize(("sampler", "objective"), PLANNED, ids=str)
def test_what_is_planned_on_the_host_reads_nothing_between_calls(sampler: Sampler, objective: Objective) -> None:
    reads, calls = count(sampler, objective)
    assert calls >= 20
    assert reads.total <= AT_START, reads


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("inner", [Confidence(steps=3), Threshold()], ids=["planned", "threshold"])
def test_the_end_of_a_text_is_looked_for_after_every_step(inner: Sampler, cache: str) -> None:
    reads, calls = count(Blockwise(10, inner, cache, end_ids=(6,)), MDLM())
    assert reads.total <= (2 * calls if isinstance(inner, Threshold) else calls) + LENGTH // 10 + AT_START, reads
