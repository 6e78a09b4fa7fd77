"""Conditional likelihood: the right bound for every objective, and the same for a request in any company."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

import tiny_models
from host_reads import host_reads
from oracle import (
    CLEAN_STATES,
    LINEAR,
    NUM_CLEAN,
    VOCAB,
    State,
    TableDenoiser,
    continuous_bound,
    discrete_bound,
    joint_table,
    random_table,
)
from unmask import D3PM, MDLM, SEDD, BlockDiffusion, LanguageModel, NextToken, Tokenizer, UniformDiffusion
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.process import posterior
from unmask.distributed import Distributed
from unmask.likelihood._estimate import NatsEstimator
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, _RequestScorer, score_requests
from unmask.likelihood.score import TIME_BINS, Score
from unmask.objectives.base import Objective, SteppedObjective

OBJECTIVES = [MDLM(), MDLM(carry_over=False), D3PM(steps=6), SEDD(), UniformDiffusion(steps=6), NextToken()]
OBJECTIVES += [BlockDiffusion(block_size=4)]
PROMPT = 1  # tokens of the oracle's texts that are given


def continuations(table: TableDenoiser, prompt: tuple[int, ...], draws: int) -> dict[State, Score]:
    """The scores of all texts after a prompt, in one call."""
    texts = [x for x in CLEAN_STATES if x[: len(prompt)] == prompt]
    requests = [ScoreRequest(x[len(prompt) :], prompt) for x in texts]
    scores = score_requests(table, table.objective, requests, ScoreConfig(draws)).per_text
    return dict(zip(texts, scores, strict=True))


def uniform_bound(table: TableDenoiser, x: State, steps: int) -> float:
    """The exact bound of uniform diffusion, given the first tokens: the KL of every step, over all z_t."""
    process = UniformDiffusion(schedule=LINEAR, steps=steps).process
    level, pi = alpha_grid(LINEAR, steps), process.pi(VOCAB)
    nats = 0.0
    for i in range(1, steps + 1):
        noisy = [state for state in CLEAN_STATES if state[:PROMPT] == x[:PROMPT]]
        z = torch.tensor(noisy)
        shown = torch.ones_like(z, dtype=torch.bool)
        log_x = table(z, torch.full((len(z), 1), i / steps, dtype=torch.float64), shown).view(*z.shape, -1)
        q = level[i] * one_hot(torch.tensor(x), VOCAB.size) + (1 - level[i]) * pi  # q(z_t | x) of each position
        p = q[torch.arange(len(x)), z][:, PROMPT:].prod(1)
        seen, clean = one_hot(z, VOCAB.size).double(), one_hot(torch.tensor(x), VOCAB.size).double()
        truth = posterior(seen, clean.expand_as(seen), pi, level[i - 1], level[i])[..., :NUM_CLEAN]
        guess = posterior(seen, log_x.exp(), pi, level[i - 1], level[i])[..., :NUM_CLEAN]
        kl = torch.where(truth > 0, truth * (truth / guess).log(), 0).sum(-1)[:, PROMPT:].sum(1)
        nats += float((p * kl).sum())
    return nats


ENUMERATED: list[tuple[Objective, float]] = [
    (MDLM(schedule=LINEAR), 0.0),
    (MDLM(schedule=LINEAR), 1.0),
    (MDLM(), 1.0),
    (SEDD(schedule=LINEAR), 0.0),
    (MDLM(steps=4), 1.0),
    (D3PM(steps=4, carry_over=True), 1.0),
    (UniformDiffusion(schedule=LINEAR, steps=4), 1.0),
]


@pytest.mark.parametrize(("objective", "drift"), ENUMERATED, ids=str)
def test_the_score_after_a_prompt_is_the_conditional_bound(objective: Objective, drift: float) -> None:
    """By enumeration of all noisy states of the continuation; z-scores are those of honest errors."""
    table = random_table(objective, drift=drift)
    scores = continuations(table, (2,), draws=2048)
    deviations = []
    for x, score in scores.items():
        if isinstance(objective, UniformDiffusion):
            exact = uniform_bound(table, x, 4)
        elif isinstance(objective, SteppedObjective) and objective.steps is not None:
            exact = discrete_bound(table, objective.schedule, objective.steps, x, PROMPT)
        else:
            assert isinstance(objective, MDLM | SEDD)
            exact = continuous_bound(table, objective.schedule, x, prompt=PROMPT)
        assert score.tokens == 2
        deviations.append((score.nats - exact) / math.sqrt(score.variance + 1e-12))
    assert max(map(abs, deviations)) < 6  # errors of eight replicates have heavy tails
    assert math.sqrt(sum(d * d for d in deviations) / len(deviations)) < 2.5


@pytest.mark.parametrize("objective", [MDLM(schedule=LINEAR), MDLM(), SEDD(schedule=LINEAR)], ids=str)
@pytest.mark.parametrize("prompt", [(), (2,), (1, 0)], ids=str)
def test_short_texts_are_scored_without_an_error(objective: MDLM | SEDD, prompt: tuple[int, ...]) -> None:
    """All maskings of a text are summed where they are no more than the draws: it is the enumerated bound."""
    table = random_table(objective, drift=0.0)
    texts = [x for x in CLEAN_STATES if x[: len(prompt)] == prompt]
    requests = [ScoreRequest(x[len(prompt) :], prompt) for x in texts]
    scored = score_requests(table, objective, requests, ScoreConfig(16, enumerate_short=True), per_token=True)
    for x, score in zip(texts, scored.per_text, strict=True):
        exact = continuous_bound(table, objective.schedule, x, prompt=len(prompt))
        assert score.nats == pytest.approx(exact, rel=1e-9)
        assert sum(score.token_nats) == pytest.approx(exact, rel=1e-9)
        assert (score.variance, score.tokens) == (0, 3 - len(prompt))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_long_texts_and_other_objectives_are_drawn_as_before(objective: Objective) -> None:
    denoiser = tiny_models.tiny_denoiser(objective)
    requests = [ScoreRequest([0, 1, 2, 3, 5, 6][: 5 - n % 3], [5, 6][: n % 3]) for n in range(20)]
    drawn, mixed = (
        score_requests(denoiser, objective, requests, ScoreConfig(16, enumerate_short=short)).per_text
        for short in (False, True)
    )
    can_enumerate = isinstance(objective, SEDD) or objective == MDLM()
    for request, before, now in zip(requests, drawn, mixed, strict=True):
        if can_enumerate and 2 ** len(request.ids) - 1 <= 16:
            assert now.variance == 0
            assert now.nats == pytest.approx(before.nats, abs=6 * math.sqrt(before.variance) + 1e-6)
        else:
            assert now.nats == pytest.approx(before.nats, rel=1e-9)


def test_a_seed_belongs_to_the_request_and_not_to_its_place() -> None:
    denoiser = tiny_models.tiny_denoiser(MDLM())
    requests = [ScoreRequest([0, 1, 2, 3], [5, 6][: n % 3], seed=1000 + n % 2) for n in range(20)]
    together = score_requests(denoiser, MDLM(), requests).per_text
    backwards = score_requests(denoiser, MDLM(), requests[::-1]).per_text[::-1]
    assert [each.nats for each in together] == pytest.approx([each.nats for each in backwards], rel=1e-9)
    assert together[0].nats == pytest.approx(together[6].nats, rel=1e-9)  # the same text, the same seed
    assert abs(together[0].nats - together[3].nats) > 1e-6  # the same text, another seed


@pytest.mark.parametrize("prompt", [(), (1,), (1, 0)], ids=str)
def test_true_conditionals_give_the_true_conditional_likelihood(prompt: tuple[int, ...]) -> None:
    """With a network that knows the joint distribution the bound is tight, and continuations sum to one."""
    table, joint = joint_table(MDLM(schedule=LINEAR))
    scores = continuations(table, prompt, draws=512)
    mass = sum(joint[x] for x in scores)
    for x, score in scores.items():
        assert score.nats == pytest.approx(-math.log(joint[x] / mass), abs=5 * math.sqrt(score.variance) + 1e-9)
    assert sum(math.exp(-score.nats) for score in scores.values()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("prompt", [(), (1,), (1, 0)], ids=str)
def test_bounds_of_all_continuations_are_bounds(prompt: tuple[int, ...]) -> None:
    """exp(-bound) is at most the model's probability, so over all continuations it sums to at most one."""
    scores = continuations(random_table(MDLM(schedule=LINEAR)), prompt, draws=512)
    error = math.sqrt(sum(score.variance * math.exp(-2 * score.nats) for score in scores.values()))
    assert sum(math.exp(-score.nats) for score in scores.values()) < 1 + 5 * error


@pytest.mark.parametrize("objective", [NextToken(), BlockDiffusion(block_size=1)], ids=str)
def test_left_to_right_the_score_is_a_difference_of_log_likelihoods(objective: Objective) -> None:
    """log p(text | prompt) = log p(prompt + text) - log p(prompt), exactly."""
    lm = LanguageModel(tiny_models.tiny_denoiser(objective))
    prompts = [[0, 1], [6], [3, 3, 2, 5], [1] * 9]
    texts = [[2, 3, 5], [0], [6, 6], [5, 0, 1]]
    found = lm.score(texts, prompts, draws=16)
    whole = lm.score([prompt + text for prompt, text in zip(prompts, texts, strict=True)], draws=16)
    for given_, both, first in zip(found.per_text, whole.per_text, lm.score(prompts, draws=16).per_text, strict=True):
        assert given_.nats == pytest.approx(both.nats - first.nats, abs=1e-9)
        assert given_.standard_error < 1e-9
    assert [score.tokens for score in found.per_text] == [3, 1, 2, 3]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_an_empty_prompt_is_none_to_the_last_bit(objective: Objective) -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(objective))
    texts = [[0, 1, 2], [3], [5, 6, 0, 1, 2, 3, 0, 1, 2, 3, 5, 6, 0]]
    plain = lm.score(texts, draws=16, seed=3)
    assert lm.score(texts, [[], [], []], draws=16, seed=3) == plain
    assert lm.score([*texts, [0]], ["", "", "", [1, 2]], draws=16, seed=3).per_text[:3] == plain.per_text


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@settings(max_examples=5)
@given(st.data())
def test_a_request_does_not_depend_on_the_others(objective: Objective, data: st.DataObject) -> None:
    """Not on how many there are, nor on their lengths, and so not on padding: but for the rounding of sums."""
    ids = st.lists(st.sampled_from([0, 1, 2, 3, 5, 6]), max_size=5)
    requests = st.builds(ScoreRequest, ids.filter(bool), ids)
    first, others = data.draw(requests), data.draw(st.lists(requests, min_size=16, max_size=24))
    denoiser, config = tiny_models.tiny_denoiser(objective), ScoreConfig(16, seed=data.draw(st.integers(0, 9)))
    same = [first, replace(first, prompt=[*first.prompt, 0]), replace(first, ids=[*first.ids, 0])]
    alone = score_requests(denoiser, objective, same, config).per_text
    among = score_requests(denoiser, objective, [*same, *others], config).per_text[:3]
    for one, other in zip(alone, among, strict=True):
        assert other.nats == pytest.approx(one.nats, rel=1e-9)
        assert other.variance == pytest.approx(one.variance, rel=1e-6, abs=1e-12)
        assert other.nats_by_bin == pytest.approx(one.nats_by_bin, rel=1e-6, abs=1e-9)


def test_the_errors_of_many_requests_are_honest() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    texts, prompts = [[0, 1, 2, 3], [5, 6, 0], [3, 3, 3], [0, 2, 5, 0, 2, 5]] * 5, [[1], [2, 3], [], [6] * 3] * 5
    scores = [lm.score(texts, prompts, draws=16, seed=seed) for seed in range(40)]
    real = float(torch.tensor([score.nats for score in scores]).var())
    reported = sum(score.variance for score in scores) / len(scores)
    assert 0.5 < reported / real < 2


def test_every_request_gets_the_precision() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    texts, prompts = [[0, 1, 2, 3, 5, 6], [5, 6, 0, 1]] * 10, [[1], []] * 10
    coarse, fine = (lm.score(texts, prompts, draws=16, precision=precision) for precision in (None, 0.01))
    assert max(score.standard_error / score.nats_per_token for score in coarse.per_text) > 0.02
    assert max(score.standard_error / score.nats_per_token for score in fine.per_text) < 0.02


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_many_short_requests_share_network_calls(objective: Objective) -> None:
    counted = tiny_models.CountingDenoiser(tiny_models.tiny_denoiser(objective))
    requests = [ScoreRequest([0, 1, 2, 3][: 1 + n % 4], [5, 6][: n % 3]) for n in range(240)]
    score_requests(counted, objective, requests, ScoreConfig(16))
    calls_of_a_draw = 2 if isinstance(objective, MDLM) and not objective.carry_over else 1
    assert counted.nfe <= 12 * (1 + calls_of_a_draw)  # one call for each of six lengths would be least


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_batch_is_read_from_the_device_once(objective: Objective) -> None:
    """Beyond what the objective and the network read: the sums of all its requests."""
    denoiser = tiny_models.tiny_denoiser(objective)
    requests = [ScoreRequest([0, 1, 2], [5, 6][: n % 2]) for n in range(20)]
    scorer = _RequestScorer(NatsEstimator(denoiser, objective), requests, ScoreConfig(), Distributed(), per_token=True)
    chunks = [chunk for index in range(20) for window in scorer._windows(index, 16) for chunk in scorer._chunks(window)]
    scorer._score_batch(chunks, TIME_BINS + 3)  # which also computes the baselines
    with host_reads() as whole:
        scorer._score_batch(chunks, TIME_BINS + 3)
    rows = torch.tensor([number for number, chunk in enumerate(chunks) for _ in range(chunk.num_rows)])
    batch = replace(scorer._batch(chunks, rows), checked_vocab=None)
    with host_reads() as loss:
        scorer.estimator.objective.token_nll(denoiser, batch, torch.Generator())
    assert whole.total - loss.total <= 1, (whole, loss)


def test_the_prompt_is_part_of_what_the_network_reads() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    nats = {tuple(prompt): lm.score([[0, 1]], [prompt], draws=64).nats for prompt in ([], [2], [3], [3, 2])}
    for one, other in itertools.combinations(nats.values(), 2):
        assert abs(one - other) > 1e-3


def test_a_prompt_that_does_not_fit_loses_its_beginning() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    prompt = [0, 1, 2, 3, 5, 6, 5, 3, 2, 1, 0, 3]
    assert lm.score([[1, 2]], [prompt]) == lm.score([[1, 2]], [prompt[-10:]])
    with pytest.raises(ValueError, match="text 1 has 12 tokens, which leaves no room for its prompt in a model of 12"):
        lm.score([[0], [1] * 12], [[], [2]])


def tokens_of(text: str, lm: LanguageModel) -> Sequence[int]:
    assert lm.tokenizer is not None
    return lm.tokenizer.encode(text)


def test_prompt_and_text_are_encoded_apart() -> None:
    tokenizer = Tokenizer.characters("abcd ")
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM(), 6, 5), tokenizer)
    score = lm.score([" cd", "a"], ["ab", ""], draws=16)
    assert score == replace(
        lm.score([tokens_of(" cd", lm), tokens_of("a", lm)], [tokens_of("ab", lm), []], draws=16),
        text_stats=score.text_stats,
        per_text=score.per_text,
    )
    assert score.text_stats is not None
    assert score.text_stats.characters == 4  # of the texts, without their prompts
    assert lm.score(" cd", "ab", draws=16) == lm.score([" cd"], ["ab"], draws=16)


def test_texts_and_prompts_must_match() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    with pytest.raises(ValueError, match="there must be one prompt for each text; got 2 texts and 1 prompts"):
        lm.score([[0], [1]], [[2]])
    with pytest.raises(ValueError, match="contains the mask id 4"):
        lm.score([[0]], [[4]])
