"""Guided lines and texts against what enumeration says they must be."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import oracle
import unmask
from oracle import (
    ALL_MASKED,
    CLEAN_STATES,
    LINEAR,
    MASK,
    State,
    chi_square_p_value,
    joint_table,
    random_table,
    sample_counts,
)
from tiny_models import CountingDenoiser, tiny_denoiser
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.guidance.allowed_tokens import AllowedTokens
from unmask.guidance.cfg import ClassifierFreeGuidance
from unmask.guidance.classifier import ExactClassifierGuidance, TaylorClassifierGuidance
from unmask.objectives import D3PM, MDLM, SEDD
from unmask.sampling import (
    Ancestral,
    Blockwise,
    Confidence,
    EntropyBounded,
    FirstHitting,
    RandomOrder,
    Sampler,
    SemiAutoregressive,
)
from unmask.sampling.blockwise import DualCache, PrefixCache
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Margin

REJECT = 1e-3
EVERY = torch.tensor(oracle.STATES)
TIMES = torch.full((len(EVERY), 1), 0.5, dtype=torch.float64)
FIRST = torch.tensor([True, False, False])


def lines(denoiser: DenoiserLike, z: Tensor = EVERY) -> Tensor:
    """[64 * 3, V]: every line of every state."""
    return denoiser(z, TIMES[: len(z)], torch.ones_like(z, dtype=torch.bool))


def last(sampler: Sampler, denoiser: DenoiserLike, tokens: Tensor) -> Tensor:
    *_, z = sampler.run(denoiser, Canvas(tokens, tuple(range(len(tokens)))))
    return z


# Classifier-free guidance.


def test_llada_writes_what_the_published_code_writes(golden: Path) -> None:
    """Temperature 0, guidance 1.5, two blocks of 16 tokens in 8 steps each; the prompt is the condition."""
    expected = load_file(golden / "llada_tiny" / "expected.safetensors")
    model = unmask.load(golden / "llada_tiny")
    prompt = expected["prompt"]
    tokens = torch.cat([prompt, torch.full((1, 32), model.vocab.mask_id)], 1)
    guided = ClassifierFreeGuidance(model.denoiser, torch.arange(40) < prompt.shape[1], 1.5)
    sampler = Blockwise(16, Confidence(steps=8, params=SamplingParams(temperature=0)))
    with model.inference_mode():
        assert torch.equal(last(sampler, guided, tokens), expected["cfg1.5.steps16.block16"])
        assert not torch.equal(last(sampler, model.denoiser, tokens), expected["cfg1.5.steps16.block16"])


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_classifier_free_lines_by_hand(scale: float) -> None:
    """p(v | given)^(1 + w) / p(v | hidden)^w, for every state and place, in one call of twice the rows."""
    table = CountingDenoiser(random_table(MDLM(schedule=LINEAR)))
    guided = lines(ClassifierFreeGuidance(table, FIRST, scale)).exp().view(64, 3, 4)
    assert (table.nfe, table.num_sequences) == (1, 128)
    p = oracle.probabilities(table, 0.5)
    for number, state in enumerate(oracle.STATES):
        hidden = p[oracle.STATES.index((MASK, *state[1:]))]
        for place in range(3):
            wanted = [
                p[number, place, v] ** (1 + scale) / hidden[place, v] ** scale if v != MASK else 0.0 for v in range(4)
            ]
            wanted = [w / sum(wanted) for w in wanted]
            assert guided[number, place].tolist() == pytest.approx(wanted, rel=1e-9)


def test_classifier_free_texts_are_those_of_the_guided_chain() -> None:
    table = random_table(MDLM(schedule=LINEAR))
    guided = ClassifierFreeGuidance(table, FIRST, 1.0)
    canvas: State = (1, MASK, MASK)
    seen = sample_counts(Ancestral(4), guided, 6400, 64, canvas)
    assert chi_square_p_value(seen, oracle.ancestral_distribution(guided, LINEAR, 4, canvas)) > REJECT
    assert chi_square_p_value(seen, oracle.ancestral_distribution(table, LINEAR, 4, canvas)) < REJECT


def test_every_sequence_has_a_condition_of_its_own() -> None:
    """By its number in the canvas, whichever others are in a call; as indices or as booleans."""
    table = random_table(MDLM(schedule=LINEAR))
    given = torch.tensor([[True, False, False], [False, True, False], [False, False, False]])
    z, t = torch.tensor([[0, 1, MASK]] * 3), torch.full((3, 1), 0.5, dtype=torch.float64)
    guided = ClassifierFreeGuidance(table, given, 2.0)
    rows = z == MASK
    together = guided(z, t, rows)
    assert torch.equal(together, guided(z, t, rows.nonzero(as_tuple=True)))
    for row in range(3):
        one = slice(row, row + 1)
        alone = guided(z[one], t[one], rows[one], sequence_ids=torch.tensor([row]))
        torch.testing.assert_close(alone[0], together[row])
        single = ClassifierFreeGuidance(table, given[row], 2.0)(z[one], t[one], rows[one])
        torch.testing.assert_close(single[0], together[row])
    torch.testing.assert_close(together[2], table(z[2:], t[2:], rows[2:])[0])
    assert not torch.allclose(together[0], together[1])


def test_classifier_free_guidance_has_a_cache_for_each_condition() -> None:
    """Blocks of one step read everything anyway, so that a cache changes nothing; golden texts have blocks of several
    (`tests/pretrained/test_families.py`)."""
    guided = ClassifierFreeGuidance(tiny_denoiser(MDLM()), torch.arange(12) < 4, 1.0)
    tokens = torch.tensor([[0] * 4 + [4] * 8])
    written, cached = (last(Blockwise(4, Ancestral(1), policy), guided, tokens) for policy in ("none", "prefix"))
    assert torch.equal(written, cached)
    with pytest.raises(ValueError, match="texts of 12 tokens, but the sampler reads 6"):
        last(SemiAutoregressive(3, 6, Ancestral(2)), guided, tokens)


@pytest.mark.parametrize(
    ("given", "scale", "message"),
    [
        (torch.ones(3), 1.0, "condition must be booleans"),
        (FIRST, -1.0, "must be 0 .none. or above; got -1.0"),
        (FIRST, math.nan, "got nan"),
    ],
)
def test_refused_conditions(given: Tensor, scale: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassifierFreeGuidance(random_table(MDLM()), given, scale)


# Classifiers.

# p(y | x) of each text.
LIKELIHOOD = dict(
    zip(
        CLEAN_STATES,
        torch.rand(27, generator=torch.Generator().manual_seed(1)).double().tolist(),
        strict=True,
    )
)


def exact_classifier(joint: dict[State, float]) -> Any:
    """log p(y | z): the mean over the texts that z can become."""
    known = []
    for state in oracle.STATES:
        agree = [x for x in CLEAN_STATES if all(z in (MASK, v) for z, v in zip(state, x, strict=True))]
        mass = sum(joint[x] for x in agree)
        known.append(math.log(sum(joint[x] * LIKELIHOOD[x] for x in agree) / mass))
    table = torch.tensor(known, dtype=torch.float64)
    return lambda z: table[(z * torch.tensor([16, 4, 1])).sum(1)]


def posterior(joint: dict[State, float], scale: float = 1.0) -> dict[State, float]:
    weight = {x: joint[x] * LIKELIHOOD[x] ** scale for x in CLEAN_STATES}
    return {x: weight[x] / sum(weight.values()) for x in CLEAN_STATES}


@pytest.mark.parametrize(
    "sampler",
    [FirstHitting(), RandomOrder(3), Confidence(3, Margin()), EntropyBounded(0)],
    ids=lambda s: type(s).__name__,
)
def test_with_the_true_classifier_texts_come_from_the_posterior(sampler: Sampler) -> None:
    """p(x | y), one place at a time in any order."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    guided = ExactClassifierGuidance(table, exact_classifier(joint))
    seen = sample_counts(sampler, guided, 6400, 64)
    assert chi_square_p_value(seen, posterior(joint)) > REJECT
    assert chi_square_p_value(seen, joint) < REJECT


def test_lines_with_the_true_classifier_are_the_posterior_conditionals() -> None:
    """At any scale log_x + scale log p(y | z, v); the classifier reads V - 1 texts a place, in parts."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    classify, read = exact_classifier(joint), []

    def counted(z: Tensor) -> Tensor:
        read.append(len(z))
        said: Tensor = classify(z)
        return said

    z = torch.tensor([(MASK, 2, MASK)])
    line = ExactClassifierGuidance(table, counted, 2.0)(z, TIMES[:1], torch.tensor([[False, False, True]]))[0].exp()
    assert sum(read) == 3
    weight = []
    for v in range(3):
        agree = [x for x in CLEAN_STATES if x[1:] == (2, v)]
        mass = sum(joint[x] for x in agree)
        weight.append(mass * (sum(joint[x] * LIKELIHOOD[x] for x in agree) / mass) ** 2)
    assert line.tolist() == pytest.approx([*(w / sum(weight) for w in weight), 0], rel=1e-9)


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table, joint = joint_table(MDLM(schedule=LINEAR))
    guided = ExactClassifierGuidance(table, exact_classifier(joint), 1.5)
    whole = lines(guided)
    monkeypatch.setattr("unmask.guidance.classifier._MAX_CLASSIFIER_TOKENS", 20)
    assert torch.equal(lines(guided), whole)


class Linear:
    """log p(y | z) = sum of a number for each token and place, which is linear in the one-hot inputs; or a
    curve of it."""

    def __init__(self, curve: Any = lambda score: score) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        self.readers = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        self.curve = curve

    def __call__(self, embedded: Tensor) -> Tensor:
        said: Tensor = self.curve((embedded * self.readers).sum((1, 2)))
        return said


def test_the_first_order_is_exact_for_a_linear_classifier() -> None:
    table, linear = random_table(MDLM(schedule=LINEAR)), Linear()
    masked = EVERY[(EVERY == MASK).all(1)]
    exact = lines(ExactClassifierGuidance(table, lambda z: linear(linear.embedding[z]), 1.3), masked)
    with torch.inference_mode():  # as a model samples
        first = lines(TaylorClassifierGuidance(table, linear, 1.3), masked)
    torch.testing.assert_close(first.exp(), exact.exp())
    assert not torch.allclose(first.exp(), lines(table, masked).exp())


def test_the_first_order_is_the_tangent_where_the_text_is() -> None:
    """Of log p = logsigmoid(score): the slope is sigmoid(-score) times that of the score."""
    table, curved = random_table(MDLM(schedule=LINEAR)), Linear(torch.nn.functional.logsigmoid)
    z = torch.tensor([(2, MASK, MASK), (0, MASK, MASK)])
    rows = z == MASK
    guided = TaylorClassifierGuidance(table, curved, 1.5)(z, TIMES[:2], rows)
    slope = (-(curved.embedding[z] * curved.readers).sum((1, 2))).sigmoid()
    assert abs(float(slope[0] - slope[1])) > 0.02
    score = torch.stack([curved.embedding @ curved.readers[place] for place in (1, 2)])
    wanted = table(z, TIMES[:2], rows).view(2, 2, 4) + 1.5 * slope[:, None, None] * score
    torch.testing.assert_close(guided.view(2, 2, 4).exp(), wanted.softmax(-1))


def test_classifiers_need_the_whole_text_and_the_same_tokens() -> None:
    tokens = torch.tensor([[0] * 4 + [4] * 8])
    guided = ExactClassifierGuidance(tiny_denoiser(MDLM()), lambda z: z.double().sum(1))
    with pytest.raises(ValueError, match="must read the whole text"):
        last(Blockwise(4, Ancestral(2), DualCache()), guided, tokens)
    with pytest.raises(ValueError, match="embeds 4 tokens and the model has 7"):
        TaylorClassifierGuidance(tiny_denoiser(MDLM()), Linear())
    with pytest.raises(ValueError, match="finite number; got inf"):
        ExactClassifierGuidance(tiny_denoiser(MDLM()), lambda z: z.double().sum(1), math.inf)


# Allowed tokens.


def random_sets(shape: tuple[int, ...], seed: int) -> Tensor:
    allowed = torch.rand(*shape, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    allowed[..., 1] |= ~allowed[..., :3].any(-1)
    return allowed


@pytest.mark.parametrize("shape", [(), (3,), (64, 3)], ids=str)
def test_allowed_lines_are_what_is_left(shape: tuple[int, ...]) -> None:
    table = random_table(MDLM(schedule=LINEAR))
    allowed = random_sets(shape, seed=3)
    cut = lines(AllowedTokens(table, allowed)).exp().view(64, 3, 4)
    left = lines(table).exp().view(64, 3, 4) * allowed
    torch.testing.assert_close(cut, left / left.sum(-1, keepdim=True))


@pytest.mark.parametrize("objective", [D3PM(schedule=LINEAR), SEDD(schedule=LINEAR)], ids=["d3pm", "sedd"])
def test_lines_keep_their_mass(objective: Any) -> None:
    """Of a free log_x: it says how likely a reveal is, which is not for guidance to change."""
    table, joint = random_table(objective), joint_table(MDLM())[1]
    for guided in (
        AllowedTokens.ban(table, [0]),
        ClassifierFreeGuidance(table, FIRST, 1.0),
        ExactClassifierGuidance(table, exact_classifier(joint)),
        TaylorClassifierGuidance(table, Linear()),
    ):
        torch.testing.assert_close(lines(guided).logsumexp(-1), lines(table).logsumexp(-1))


@pytest.mark.parametrize(
    "sampler",
    [
        Ancestral(2),
        FirstHitting(),
        Confidence(3),
        Blockwise(5, Ancestral(2)),
        Blockwise(5, Ancestral(2), PrefixCache()),
        Blockwise(5, Ancestral(2), DualCache()),
        SemiAutoregressive(6, 12, RandomOrder(2)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_nothing_else_is_written(sampler: Sampler) -> None:
    """Whichever part of the text a call shows."""
    tokens = torch.full((8, 12), 4)
    tokens[:, 3] = 0
    bare = tiny_denoiser(MDLM())
    written = last(sampler, AllowedTokens.at_positions(bare, {0: [1, 2], 7: [5], 11: [0, 6]}, 12), tokens)
    assert set(written[:, 0].tolist()) <= {1, 2}
    assert set(written[:, 7].tolist()) == {5}
    assert set(written[:, 11].tolist()) <= {0, 6}
    written = last(sampler, AllowedTokens.ban(bare, [0, 1, 2]), tokens)
    assert set(written[tokens == 4].tolist()) == {3, 5, 6}


def test_a_place_without_a_token_is_refused_before_anything_is_drawn() -> None:
    """Even if it is the last to be asked; where nothing is to be written, nothing needs to be allowed."""
    counted = CountingDenoiser(random_table(MDLM(schedule=LINEAR)))
    allowed = torch.ones(2, 3, 4, dtype=torch.bool)
    allowed[1, 2, :3] = False
    cut = AllowedTokens(counted, allowed)
    last(FirstHitting(), cut, torch.tensor([ALL_MASKED, (MASK, MASK, 1)]))
    calls = counted.nfe
    with pytest.raises(ValueError, match="no token is allowed at the masked position 2 of sequence 1"):
        last(FirstHitting(), cut, torch.tensor([ALL_MASKED, ALL_MASKED]))
    assert counted.nfe == calls
    with pytest.raises(ValueError, match="no token is allowed"):
        last(Ancestral(2), AllowedTokens.ban(counted, range(3)), torch.tensor([ALL_MASKED]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda d: AllowedTokens(d, torch.ones(4)), "allowed must be booleans"),
        (
            lambda d: AllowedTokens(d, torch.ones(3, 5, dtype=torch.bool)),
            "with V = 4; got torch.bool of shape .3, 5.",
        ),
        (lambda d: AllowedTokens.ban(d, [4]), "token id 4 is outside the vocabulary 0..3"),
        (lambda d: AllowedTokens.at_positions(d, {3: [0]}, 3), "position 3 is outside a text of 3 tokens"),
        (
            lambda d: last(
                Ancestral(1),
                AllowedTokens(d, torch.ones(1, 3, 4, dtype=torch.bool)),
                torch.tensor([ALL_MASKED] * 2),
            ),
            "are defined for 1 sequences; got sequence id 1",
        ),
    ],
)
def test_refused_sets(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(random_table(MDLM(schedule=LINEAR)))


def test_guides_nest() -> None:
    """Constraints around guidance around guidance: the product of all, in any order of drawing."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    guided = AllowedTokens.ban(ExactClassifierGuidance(table, exact_classifier(joint)), [1])
    seen = sample_counts(FirstHitting(), guided, 3200, 64)
    p = oracle.random_order_distribution(guided)
    assert chi_square_p_value(seen, p) > REJECT
    assert all(p[x] == 0 for x, place in itertools.product(CLEAN_STATES, range(3)) if x[place] == 1)
