"""The lengths of open holes, in a world whose texts of every length can be enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import unmask
from tiny_models import tiny_denoiser
from unmask import MDLM, BlockDiffusion, DiTConfig, LanguageModel, NextToken, Tokenizer, UniformDiffusion
from unmask.diffusion.process import Masking
from unmask.likelihood import hole_lengths as module
from unmask.likelihood.hole_lengths import HoleLengths, hole_lengths
from unmask.types import RowFn, Vocab

MASK = 3
Text = tuple[int, ...]


@dataclass
class World:
    """Texts of three tokens; for every length a random distribution, whose conditionals the network knows."""

    max_length: int | None = None
    eos_id: int | None = None
    shift_logits: bool = False
    normalized: bool = True
    time_independent: bool = True
    process: Masking = field(default_factory=Masking)
    calls: int = 0

    @property
    def vocab(self) -> Vocab:
        return Vocab(size=4, mask_id=MASK, eos_id=self.eos_id)

    def joint(self, length: int) -> dict[Text, float]:
        texts = list(itertools.product(range(3), repeat=length))
        return dict(zip(texts, np.random.default_rng(length).dirichlet(np.ones(len(texts)) / 3).tolist(), strict=True))

    def probability(self, z: Sequence[int]) -> float:
        """Of the tokens of a text that are not masked."""
        agrees = (p for x, p in self.joint(len(z)).items() if all(a in (MASK, b) for a, b in zip(z, x, strict=True)))
        return sum(agrees)

    def __call__(self, z: Tensor, t: Tensor, positions: Tensor, *_: Any, row_fn: RowFn | None = None, **__: Any) -> Any:
        self.calls += len(z)
        rows = []
        for row, place in positions.nonzero().tolist():
            state = z[row].tolist()
            options = [[*state[:place], token, *state[place + 1 :]] for token in range(3)]
            p = np.array([self.probability(option) for option in options] + [0.0])
            rows.append(torch.from_numpy(np.log(np.maximum(p / p.sum(), 1e-300))))
        log_x = torch.stack(rows)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


def exact(world: World, texts: dict[tuple[int, ...], Sequence[int]]) -> dict[tuple[int, ...], float]:
    """P(lengths | given tokens) by Bayes' rule."""
    p = {lengths: world.probability(z) for lengths, z in texts.items()}
    return {lengths: each / sum(p.values()) for lengths, each in p.items()}


def by_lengths(found: HoleLengths) -> dict[tuple[int, ...], float]:
    return dict(zip(found.lengths, found.probabilities, strict=True))


def test_the_posterior_is_that_of_bayes() -> None:
    world = World()
    found = hole_lengths(world, [[0, 1], range(4), [2]])
    expected = exact(world, {(n,): [0, 1, *[MASK] * n, 2] for n in range(4)})
    assert by_lengths(found) == pytest.approx(expected)
    assert list(found.probabilities) == sorted(found.probabilities, reverse=True)
    assert set(found.standard_errors) == {0.0}  # all maskings of three tokens were summed


def test_several_holes_and_one_of_a_known_length() -> None:
    world = World()
    found = hole_lengths(world, [range(1, 3), [1], 1, range(2), [2, 0]])
    texts = {(m, n): [*[MASK] * m, 1, MASK, *[MASK] * n, 2, 0] for m in (1, 2) for n in (0, 1)}
    assert by_lengths(found) == pytest.approx(exact(world, texts))


def test_maskings_are_drawn_where_there_are_many() -> None:
    world = World()
    found = hole_lengths(world, [[0, 1], range(3), [2, 1]], draws=14)
    expected = exact(world, {(n,): [0, 1, *[MASK] * n, 2, 1] for n in range(3)})
    best = found.lengths[0]
    for lengths, p, error in zip(found.lengths, found.probabilities, found.standard_errors, strict=True):
        off = math.log(p / found.probabilities[0]) - math.log(expected[lengths] / expected[best])
        assert abs(off) <= 5 * error + 1e-9
    assert min(found.standard_errors[1:]) > 0


def test_the_mean_over_draws_is_exact() -> None:
    """Weights and maskings together: unbiased, whatever the number of tokens."""
    world, pieces = World(), [[0, 1], range(1, 2), [2, 1]]
    text = next(iter(module._texts(world, pieces)))
    nats = []
    for seed in range(200):
        maskings, weight, is_exact = module._draw_maskings(4, 8, seed)
        assert not is_exact
        nats.append(float((module._nats(world, [text], maskings)[0] * weight).mean()))
    expected = -math.log(world.probability(text.ids))
    assert abs(np.mean(nats) - expected) <= 5 * np.std(nats) / math.sqrt(len(nats)) + 1e-9


def test_the_end_of_a_text_tells_the_length_of_a_last_hole() -> None:
    world = World(eos_id=2)
    found = hole_lengths(world, [[0], range(1, 4)])
    assert by_lengths(found) == pytest.approx(exact(world, {(n,): [0, *[MASK] * n, 2] for n in (1, 2, 3)}))


def test_what_does_not_fit_is_cut_off_far_from_the_holes() -> None:
    world = World(max_length=6)
    found = hole_lengths(world, [[0, 1, 2, 0], range(2, 4), [1, 1, 2]])
    texts = {(n,): [2, 0, *[MASK] * n, 1] for n in (2, 3)}
    assert by_lengths(found) == pytest.approx(exact(world, texts))


def test_lengths_that_are_far_behind_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world, pieces = World(), [[0, 1], range(4), [2, 1]]
    monkeypatch.setattr(module, "_FIRST_DRAWS", 6)
    every = hole_lengths(world, pieces, draws=12)
    monkeypatch.setattr(module, "_FAR_BEHIND", -1.0)
    world.calls = 0
    few = hole_lengths(world, pieces, draws=12)
    assert few.lengths[0] == every.lengths[0]
    assert world.calls < 4 * 12


def test_lengths_are_drawn_with_their_probabilities() -> None:
    found = HoleLengths(((1,), (2,), (5,)), (0.5, 0.3, 0.2), (0.0, 0.0, 0.0))
    drawn = [found.draw(seed) for seed in range(2000)]
    counts = [drawn.count(lengths) for lengths in found.lengths]
    assert stats.chisquare(counts, [2000 * p for p in found.probabilities]).pvalue > 1e-4
    assert found.draw(3) == found.draw(3)


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([[0], range(300), [1]], "could have 300 combinations of lengths, and at most 256 are compared"),
        ([[0], range(1, 3)], "nothing follows the last hole, and this model knows no end of text"),
        ([range(1, 3), 2, range(1, 2), [MASK]], "no text is given around the holes"),
        ([[0], range(1, 9), [1]], "have up to 8 tokens, more than the model's 5: give narrower ranges"),
    ],
)
def test_impossible_questions(pieces: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        hole_lengths(World(max_length=5 if "narrower" in sentence else None), pieces)


@pytest.mark.parametrize("objective", [NextToken(), BlockDiffusion(block_size=2), UniformDiffusion()])
def test_other_processes_cannot_tell(objective: unmask.Objective) -> None:
    with pytest.raises(ValueError, match=r"models of masked tokens that read both sides.*as in <mask:12>"):
        hole_lengths(tiny_denoiser(objective), [[0], range(1, 3), [1]])


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    torch.manual_seed(0)
    backbone = DiTConfig(width=32, depth=1, heads=2, max_length=24)
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.characters("abc "))
    torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight, std=1.0)  # type: ignore[union-attr, arg-type]
    return lm


def test_a_text_has_the_length_that_its_seed_draws(lm: LanguageModel) -> None:
    template = "ab<mask:0..6>c"
    posterior = lm.hole_lengths(template)
    assert sorted(length for (length,) in posterior.lengths) == list(range(7))
    assert sum(posterior.probabilities) == pytest.approx(1)
    texts = lm.infill(template, n=8, seed=5).texts
    assert [len(text) - 3 for text in texts] == [posterior.draw(seed)[0] for seed in range(5, 13)]
    assert all(text.startswith("ab") and text.endswith("c") for text in texts)
    assert lm.infill(template, seed=7).texts == texts[2:3]
    many = lm.infill([template, "a<mask:2>b"], n=2, seed=5).texts
    assert many[:2] == texts[:2]
    assert all(len(text) == 4 for text in many[2:])


def test_nothing_may_be_missing(lm: LanguageModel) -> None:
    assert set(map(len, lm.infill(["ab", range(2), "c"], n=20).texts)) == {3, 4}
    empty = [seed for seed in range(20) if lm.hole_lengths("ab<mask:0..1>c").draw(seed) == (0,)]
    assert lm.infill("ab<mask:0..1>c", seed=empty[0]).texts == ["abc"]


def test_what_has_lengths_needs_no_choice(lm: LanguageModel) -> None:
    with pytest.raises(ValueError, match="every hole of this template has a length"):
        lm.hole_lengths("a<mask:3>b")
    with pytest.raises(ValueError, match="draws must be at least 1; got 0"):
        lm.hole_lengths("a<mask:1..3>b", draws=0)
    with pytest.raises(ValueError, match="the length of every hole must be known"):
        lm.encode_template("a<mask:1..3>b")
