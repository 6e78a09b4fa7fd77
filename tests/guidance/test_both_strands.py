"""Both strands: predictions are equivariant, and so is the law of samples."""

from __future__ import annotations

import pytest
import torch

import oracle
import tiny_models
from unmask.backbones.dit import DiTConfig
from unmask.context import Context
from unmask.data.tokenizers import Tokenizer, get_tokenizer
from unmask.diffusion.schedule import Cosine
from unmask.guidance import BothStrands
from unmask.model import LanguageModel
from unmask.objectives import D3PM, MDLM, SEDD, NextToken, Objective

COMPLEMENT = (1, 0, 2, 3)  # of the oracle's three tokens and the mask


def strand(state: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(COMPLEMENT[token] for token in reversed(state))


@pytest.mark.parametrize("objective", [MDLM(), SEDD(), D3PM(steps=None)], ids=lambda o: type(o).__name__)
def test_predictions_are_exactly_equivariant(objective: Objective) -> None:
    """Bit for bit, for every state, at every position; and the average of what each strand says."""
    table = oracle.random_table(objective)
    both = BothStrands(table, COMPLEMENT)
    z = torch.tensor(oracle.STATES)
    rc = torch.tensor(COMPLEMENT)[z].flip(1)
    t, everywhere = torch.full((64, 1), 0.4, dtype=torch.float64), torch.ones_like(z, dtype=torch.bool)
    here = both(z, t, everywhere).view(64, 3, 4)
    there = both(rc, t, everywhere).view(64, 3, 4)
    assert torch.equal(there.flip(1)[..., list(COMPLEMENT)], here)
    one, other = (table(x, t, everywhere).view(64, 3, 4).exp() for x in (z, rc))
    torch.testing.assert_close(here.exp(), (one + other.flip(1)[..., list(COMPLEMENT)]) / 2)
    if both.normalized:
        torch.testing.assert_close(here.exp().sum(-1), torch.ones(64, 3, dtype=torch.float64))


def test_both_strands_of_a_sample_have_the_same_law() -> None:
    table = oracle.random_table(MDLM(), drift=0.0)
    law = oracle.ancestral_distribution(BothStrands(table, COMPLEMENT), Cosine(), 4)
    assert all(law[x] == pytest.approx(law[strand(x)], rel=1e-12) for x in law)
    one_strand = oracle.ancestral_distribution(table, Cosine(), 4)
    assert any(one_strand[x] != pytest.approx(one_strand[strand(x)], rel=1e-2) for x in law)


def test_row_functions_times_and_padding_are_those_of_each_strand() -> None:
    model = tiny_models.tiny_denoiser(MDLM(), time_conditioned=True)
    both = BothStrands(model, (1, 0, 3, 2, 4, 6, 5))
    z = torch.tensor([[4, 1, 4, 0, 5], [2, 4, 4, 3, 4]])
    t = torch.linspace(0.1, 0.9, 10, dtype=torch.float64).view(2, 5)
    positions = torch.tensor([1, 0, 0]), torch.tensor([2, 2, 0])
    log_x = both(z, t, positions)
    picked = both(z, t, positions, row_fn=lambda rows, _: rows[:, 1])
    assert torch.equal(picked, log_x[:, 1])
    padded, valid = torch.nn.functional.pad(z, (0, 3)), torch.arange(8).expand(2, -1) < 5
    times = torch.nn.functional.pad(t, (0, 3))
    torch.testing.assert_close(both(padded, times, positions, Context(valid=valid)), log_x, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    torch.manual_seed(0)
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=32, dropout=0.0)
    model = LanguageModel.from_config(backbone, MDLM(), get_tokenizer("dna"))
    for parameter in model.denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_a_model_scores_and_samples_both_strands(lm: LanguageModel) -> None:
    both = lm.with_both_strands()
    text, other = "ACGGTTACNA", "TNGTAACCGT"
    one, two = (both.score([x], draws=512).nats_per_token for x in (text, other))
    apart = [lm.score([x], draws=512).nats_per_token for x in (text, other)]
    assert abs(one - two) < 0.2 * abs(apart[0] - apart[1])
    assert both.score(text).tokens == 9
    samples = both.sample(n=4, length=12, seed=1)
    assert set("".join(samples.texts).replace("[SEP]", "").replace("[UNK]", "")) <= set("ACGT")
    assert samples.texts[0] == both.sample(length=12, seed=1).text
    assert both.infill("ACG<mask:4>TTN").text.startswith("ACG")
    assert both.complete(["ACG", "A"], 4).tokens.shape[0] == 2


def test_what_has_no_strands_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"^both strands are those of DNA, and this model's tokenizer knows no"):
        LanguageModel.from_config(lm.denoiser.config.backbone, MDLM(), Tokenizer.bytes()).with_both_strands()
    with pytest.raises(ValueError, match="that of the mask itself"):
        BothStrands(lm.denoiser, (0, 1, 2))
    with pytest.raises(ValueError, match="the complement of a complement must be the id itself"):
        BothStrands(tiny_models.tiny_denoiser(MDLM()), (1, 2, 0, 3, 4, 5, 6))
    with pytest.raises(ValueError, match="read in both directions"):
        BothStrands(tiny_models.tiny_denoiser(NextToken()), range(7))
    model = tiny_models.tiny_denoiser(MDLM())
    z, t = torch.tensor([[4, 1]]), torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="sample without cache or blocks"):
        BothStrands(model, range(7))(z, t, z == 4, Context(cache=model.new_cache().view()))
