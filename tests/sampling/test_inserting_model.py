"""A language model that inserts tokens: texts of any length, alone and saved, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unmask import DiTConfig, Guidance, LanguageModel, TimeConditioning, Tokenizer, load, save
from unmask.objectives import FlexMDM

GIVEN = "ab"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    torch.manual_seed(0)
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=48, dropout=0.0, time_conditioning=TimeConditioning(8))
    model = LanguageModel.from_config(backbone, FlexMDM(), Tokenizer.bytes())
    with torch.no_grad():
        model.denoiser.backbone.lm_head.bias[model.vocab.mask_id] = 1.0
    model.denoiser.eval()
    return model


def test_holes_have_texts_of_different_lengths(lm: LanguageModel) -> None:
    samples = lm.infill([[97, 98], range(9), [99]], n=6, sampler="default")
    assert all(ids[:2] == [97, 98] and ids[-1] == 99 and len(ids) <= 11 for ids in samples.ids)
    assert len({len(ids) for ids in samples.ids}) > 1
    assert all(lm.vocab.mask_id not in ids for ids in samples.ids)
    alone = lm.infill([[97, 98], range(9), [99]], seed=3)
    assert alone.ids[0] == samples.ids[3]


def test_templates_of_different_lengths_share_a_request(lm: LanguageModel) -> None:
    many = lm.infill(["x<mask:*>", "a longer one<mask:0..4>!"])
    assert many.ids[0] == lm.infill("x<mask:*>").ids[0]
    assert many.ids[1] == lm.infill("a longer one<mask:0..4>!", seed=1).ids[0]


def test_texts_and_completions_have_at_most_the_length(lm: LanguageModel) -> None:
    samples, completions = lm.sample(n=5, length=12), lm.complete(["ab", "c"], 6)
    assert max(map(len, samples.ids)) <= 12
    assert len({len(ids) for ids in samples.ids}) > 1
    assert all(len(ids) <= 6 and lm.vocab.mask_id not in ids for ids in completions.ids)


def test_scores_are_bounds_that_know_the_end(lm: LanguageModel) -> None:
    score = lm.score(["abc"], per_token=True)
    assert score.per_text[0].token_nats is not None
    assert sum(score.per_text[0].token_nats) == pytest.approx(score.nats, rel=1e-5)
    assert lm.score(["c"], prompts=["ab"]).nats < score.nats


def test_a_saved_model_writes_the_same(lm: LanguageModel, tmp_path: Path) -> None:
    save(lm, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.infill("f(<mask:*>)", seed=5).ids == lm.infill("f(<mask:*>)", seed=5).ids
    assert again.objective == lm.objective


@pytest.mark.parametrize("hole", ["<mask>", "<mask:3>", "<mask:2..5>"])
def test_lengths_that_are_given_are_refused(lm: LanguageModel, hole: str) -> None:
    with pytest.raises(ValueError, match="this model chooses how long a hole is: write <mask:\\*>"):
        lm.infill(f"x = {hole}")


def test_what_belongs_to_positions_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="positions of a text, which move"):
        lm.infill("x = <mask:*>", guidance=Guidance(regex="[0-9]+"))
    with pytest.raises(ValueError, match="draws the length of a hole with its text"):
        lm.hole_lengths("x = <mask:*>")
    with pytest.raises(ValueError, match="inserts tokens"):
        lm.infill("x = <mask:*>", sampler="confidence")
