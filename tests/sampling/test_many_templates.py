"""`infill` with several templates: padded to one batch, and each the same text as alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from unmask import MDLM, SEDD, LanguageModel
from unmask.objectives import Objective
from unmask.sampling import SAMPLERS, Sampler

pytestmark = pytest.mark.thorough

MASK = 4
PAIRS = [
    (sampler, kind())
    for kind in tiny_models.OBJECTIVES
    for sampler in tiny_models.all_samplers()
    if kind is not SEDD and not kind().process.inserts_tokens and tiny_models.is_compatible(sampler, kind())
]
templates = st.lists(
    st.lists(st.sampled_from([0, 1, 2, MASK, MASK]), min_size=1, max_size=9).filter(lambda ids: MASK in ids),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(("sampler", "objective"), PAIRS, ids=lambda value: type(value).__name__)
@settings(max_examples=4, deadline=None)
@given(templates=templates, seed=st.integers(0, 2**40))
def test_each_template_is_filled_as_if_it_were_alone(
    sampler: Sampler, objective: Objective, templates: list[list[int]], seed: int
) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(objective))
    together = lm.infill([*templates], sampler=sampler, seed=seed)
    for number, ids in enumerate(templates):
        alone = lm.infill(torch.tensor(ids), sampler=sampler, seed=seed + number)
        assert together.ids[number] == alone.ids[0]


def test_versions_of_a_template_follow_each_other() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    together = lm.infill([[1, MASK, MASK], torch.tensor([MASK] * 5)], n=2, seed=3)
    assert [len(row) for row in together.ids] == [3, 3, 5, 5]
    assert together.ids[2:] == lm.infill([MASK] * 5, n=2, seed=5).ids


def test_a_list_with_integers_is_one_template_and_any_other_list_is_several() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    pieces = [[1, 2], 3, [0]]
    assert lm.infill(pieces, seed=1).ids == lm.infill([1, 2, MASK, MASK, MASK, 0], seed=1).ids
    assert lm.infill([pieces, "1 <mask:2>"], seed=1).ids[0] == lm.infill(pieces, seed=1).ids[0]
    with pytest.raises(ValueError, match="there is no template"):
        lm.infill([])
    with pytest.raises(ValueError, match="has no hole"):
        lm.infill(["1 <mask>", "1 2"])


def test_the_names_of_the_table_work_for_many_templates() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    for name in SAMPLERS:
        ids = lm.infill(["1 <mask:3>", "<mask:2> 0 <mask>"], sampler=name).ids
        assert [len(row) for row in ids] == [4, 4]
        assert not any(MASK in row for row in ids)
