"""Distillation losses in the tiny world: against enumeration, at fixed points, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import LENGTH, MASK, STATES, VOCAB, TableDenoiser, probabilities, random_table
from tiny_models import tiny_denoiser
from unmask import D3PM, MDLM, Batch, BlockDiffusion, Cosine, Denoiser, GenMD4, NextToken, UniformDiffusion, Vocab
from unmask.diffusion.noise_level import alpha_grid
from unmask.diffusion.schedule import LogLinear
from unmask.distillation import DCD, SDTT, ConfidenceDistillation, Distillation
from unmask.distillation.base import KL
from unmask.distillation.confidence import ConfidenceLoss
from unmask.distillation.dcd import coupled, prob_kept
from unmask.objectives import Objective

X = torch.tensor([[0, 2, 1]])
ALL_MASKED = torch.full((1, LENGTH), MASK)


def uniforms(method: SDTT, seeds: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seeds)
    return [torch.rand(1, LENGTH, dtype=torch.float64, generator=generator) for _ in range(method.teacher_steps)]


def as_state(z: tuple[int, ...]) -> int:
    return STATES.index(z)


def enumerated_targets(teacher: TableDenoiser, method: SDTT, t: float, number: int) -> dict[tuple[Any, ...], float]:
    """{(step and token of each position): probability}: the teacher's steps from all masks, by the definition.

    A position without a token at the end has (m - 1, None): so has one that the last step unmasks, whatever it becomes.
    """
    size, m = 2**number / method.sampling_steps, method.teacher_steps
    schedule = teacher.process.schedule  # type: ignore[attr-defined]
    paths: dict[tuple[Any, ...], float] = {((None,) * LENGTH): 1.0}
    for i in range(m - 1):
        time, after = t - i * size, t - (i + 1) * size
        alpha_t = float(schedule.alpha(torch.tensor(time, dtype=torch.float64)))
        alpha_s = 1.0 if after <= 0 else float(schedule.alpha(torch.tensor(after, dtype=torch.float64)))
        r = (alpha_s - alpha_t) / (1 - alpha_t)
        grown: dict[tuple[Any, ...], float] = {}
        for path, p in paths.items():
            z = tuple(MASK if each is None else each[1] for each in path)
            x = probabilities(teacher, time)[as_state(z)]
            choices = [
                [(path[place], 1.0)]
                if path[place] is not None
                else [(None, 1 - r), *(((i, v), r * float(x[place, v])) for v in range(3))]
                for place in range(LENGTH)
            ]
            for combination in itertools.product(*choices):
                key = tuple(each for each, _ in combination)
                grown[key] = grown.get(key, 0) + p * math.prod(q for _, q in combination)
        paths = grown
    return paths


def mean_loss(student: TableDenoiser, teacher: TableDenoiser, method: SDTT, t: float, number: int) -> float:
    """The exact expectation of the summed KL, from all masks."""
    total, size = 0.0, 2**number / method.sampling_steps
    log_q = torch.tensor(probabilities(student, t)[as_state((MASK,) * LENGTH)]).log()
    for path, p in enumerated_targets(teacher, method, t, number).items():
        for place in range(LENGTH):
            step = method.teacher_steps - 1 if path[place] is None else path[place][0]
            z = tuple(MASK if each is None or each[0] >= step else each[1] for each in path)
            target = probabilities(teacher, max(0.0, t - step * size))[as_state(z)][place]
            q = log_q[place, :3].exp()
            total += p * float((q * (log_q[place, :3] - torch.tensor(target[:3]).log())).sum())
    return total


@pytest.mark.parametrize("schedule", [LogLinear(), Cosine()])
@pytest.mark.parametrize(("teacher_steps", "t", "number"), [(2, 0.9, 1), (3, 0.7, 0), (2, 0.3, 2)])
def test_the_mean_loss_of_sdtt_is_the_enumerated_one(schedule: Any, teacher_steps: int, t: float, number: int) -> None:
    method = SDTT(sampling_steps=8, teacher_steps=teacher_steps)
    teacher, student = (random_table(MDLM(schedule=schedule), seed) for seed in (1, 2))
    rows = 4000
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(rows, LENGTH, dtype=torch.float64, generator=generator) for _ in range(teacher_steps)]
    z = ALL_MASKED.expand(rows, -1)
    time = torch.full((rows, 1), t, dtype=torch.float64)
    losses = (
        method.divergence(student, teacher, Batch(X.expand(rows, -1)), z, time, number, draws).view(rows, -1).sum(1)
    )
    exact, error = mean_loss(student, teacher, method, t, number), float(losses.std()) / rows**0.5
    assert abs(float(losses.mean()) - exact) < 4 * error + 1e-9
    assert error < 0.05 * exact


def test_the_steps_of_positions_have_the_enumerated_frequencies() -> None:
    """From t = 0.9 in steps of 0.25: the exact shares are alpha's increments over 1 - alpha(t)."""
    method, schedule = SDTT(sampling_steps=4, teacher_steps=3), LogLinear()
    uniform = (torch.arange(100_000, dtype=torch.float64)[None] + 0.5) / 100_000
    t = torch.tensor([[0.9]], dtype=torch.float64)
    step = method.unmasking_steps(schedule, method.times(t, 0), 0, uniform)
    alphas = schedule.alpha(torch.tensor([0.9, 0.65, 0.4], dtype=torch.float64))
    shares = torch.cat([alphas.diff(), 1 - alphas[-1:]]) / (1 - alphas[0])
    torch.testing.assert_close(step.flatten().bincount().double() / 100_000, shares, atol=2e-5, rtol=0)


def test_the_right_grid_is_that_of_the_sampler() -> None:
    """A teacher of N steps that starts on the grid of its sampler unmasks at the sampler's rates, to the last step."""
    steps = 8
    method, schedule = SDTT(sampling_steps=steps, teacher_steps=steps), LogLinear()
    uniform = (torch.arange(10_000, dtype=torch.float64)[None] + 0.5) / 10_000
    t = torch.ones(1, 1, dtype=torch.float64)
    times = method.times(t, 0)
    assert [round(float(time) * steps) for time in times] == list(range(steps, 0, -1))
    step = method.unmasking_steps(schedule, times, 0, uniform).flatten()
    grid = alpha_grid(schedule, steps).flip(0)
    shares = (grid.diff() - grid.diff()[0] * 0) / (1 - grid[0])
    # The sampler starts at alpha = 0, and q(z_1) at alpha(1) = 0.001, where a thousandth is visible already.
    torch.testing.assert_close(step.bincount().double() / 10_000, shares, atol=2e-3, rtol=0)


def test_published_times_are_another_grid() -> None:
    even, published = SDTT(sampling_steps=8), SDTT(sampling_steps=8, published_times=True)
    t = torch.tensor([[0.5]], dtype=torch.float64)
    assert [float(time) for time in even.times(t, 0)] == [0.5, 0.375]
    first, second = published.times(t, 0)
    assert float(first) == pytest.approx(0.5 + 0.5 * 0.25, abs=1e-5)
    assert float(second) == pytest.approx(0.5 * 0.25, abs=1e-5)


# Fixed points


def factorised(seed: int = 0) -> TableDenoiser:
    """A network that says the same of a position whatever else it sees, at all times."""
    table = random_table(MDLM(), seed, drift=0.0)
    return replace(table, logits=table.logits[:1].expand_as(table.logits))


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), t=st.floats(0.01, 1), number=st.integers(0, 2), steps=st.integers(1, 4))
def test_a_factorised_teacher_is_its_own_fixed_point(seed: int, t: float, number: int, steps: int) -> None:
    method, table = SDTT(sampling_steps=16, teacher_steps=steps), factorised()
    time = torch.tensor([[t]], dtype=torch.float64)
    loss = method.divergence(table, table, Batch(X), ALL_MASKED, time, number, uniforms(method, seed))
    assert float(loss.abs().max()) < 1e-12
    assert (
        float(method.divergence(factorised(1), table, Batch(X), ALL_MASKED, time, number, uniforms(method, seed)).min())
        > 0
    )


@pytest.mark.parametrize("forward", [False, True])
def test_the_divergence_and_its_gradient_vanish_where_the_student_says_the_target(forward: bool) -> None:
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    objective = MDLM()
    log_x = objective.log_probs(logits, torch.zeros(5, 1), VOCAB)
    target = log_x.detach()
    loss = KL(target, MASK, forward)(log_x, slice(None))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert float(loss.detach().abs().max()) < 1e-12
    assert float(gradient.abs().max()) < 1e-12
    wrong = KL(target.roll(1, 0), MASK, forward)(objective.log_probs(logits, torch.zeros(5, 1), VOCAB), slice(None))
    (gradient,) = torch.autograd.grad(wrong.sum(), logits)
    assert gradient.isfinite().all()
    assert float(gradient.abs().max()) > 0.01
    p, q = (each[:, :3].exp() for each in (target, target.roll(1, 0)))
    expected = (q * (q / p).log()).sum(1) if forward else (p * (p / q).log()).sum(1)
    torch.testing.assert_close(wrong.detach(), expected)


def networks(objective: Objective) -> tuple[Denoiser, Denoiser]:
    """A student that is trained, and a teacher with other weights, neither frozen."""
    teacher = tiny_denoiser(objective)
    student = teacher.config.build().double()
    student.load_state_dict({name: weight * 0.9 for name, weight in teacher.state_dict().items()})
    other = teacher.config.build().double().eval()
    other.load_state_dict(teacher.state_dict())
    return student, other


METHODS: list[tuple[Any, Objective]] = [
    (SDTT(sampling_steps=16), MDLM()),
    (SDTT(sampling_steps=16, teacher_steps=3, forward_kl=True), MDLM()),
    (DCD(sampling_steps=16), UniformDiffusion()),
]


@pytest.mark.parametrize(("method", "objective"), METHODS)
def test_gradients_are_the_students_only(method: Any, objective: Objective) -> None:
    student, teacher = networks(objective)
    batch = Batch(torch.randint(4, (6, 12), generator=torch.Generator().manual_seed(0)))
    loss = method.loss(student, teacher, batch, 1, torch.Generator().manual_seed(3))
    loss.total.backward()
    assert float(loss.total.detach()) > 0
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(("method", "objective"), METHODS)
def test_prompts_and_padding_are_neither_noised_nor_counted_and_parts_add_up(method: Any, objective: Objective) -> None:
    student, teacher = networks(objective)
    tokens = torch.randint(4, (6, 12), generator=torch.Generator().manual_seed(0))
    prompt = torch.zeros(6, 12, dtype=torch.bool)
    prompt[:, :4] = True
    valid = torch.ones(6, 12, dtype=torch.bool)
    valid[3:, 9:] = False
    whole = Batch(tokens, valid, prompt)

    def loss(batch: Batch) -> tuple[float, float]:
        found = method.loss(student, teacher, batch, 0, torch.Generator().manual_seed(3))
        return float(found.total.detach()), float(found.count)

    total, count = loss(whole)
    assert 0 < count <= int(whole.loss_mask.sum())
    parts = [
        loss(Batch(tokens[a:b], valid[a:b], prompt[a:b], row_offset=a, global_batch_size=6))
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    assert total == pytest.approx(sum(part[0] for part in parts))
    assert count == sum(part[1] for part in parts)


# DCD


def test_the_states_of_dcd_are_on_one_path_with_the_right_marginals() -> None:
    """On a grid of all uniform numbers: exact frequencies at each alpha, and a token that is replaced stays so."""
    vocab, n = Vocab(6, 2), 250
    clean = [0, 1, 3, 4, 5]
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    uniform, other = grid.repeat_interleave(n)[None], grid.repeat(n)[None]
    states = {}
    for x in clean:
        for alpha in (0.9, 0.5, 0.1, 0.0):
            tokens = torch.full_like(uniform, x, dtype=torch.long)
            z = coupled(tokens, torch.tensor([[alpha]], dtype=torch.float64), uniform, other, vocab)
            share = z.flatten().bincount(minlength=6).double() / n**2
            expected = UniformDiffusion().process.pi(vocab) * (1 - alpha)
            expected[x] += alpha
            torch.testing.assert_close(share, expected, atol=6e-3, rtol=0)
            states[x, alpha] = z
        early, late = states[x, 0.9], states[x, 0.5]
        assert torch.equal(late[early != x], early[early != x])


@pytest.mark.parametrize("size", [2, 27, 50_000])
def test_the_probability_to_be_kept_is_that_of_the_argmax(size: int) -> None:
    signal = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    kept = prob_kept(signal, size)
    assert float(kept[0]) == pytest.approx(1 / size, rel=1e-9)
    if size == 2:  # P(eps_1 - eps_2 < signal)
        torch.testing.assert_close(kept, torch.special.ndtr(signal / 2**0.5), rtol=1e-12, atol=0)
    else:
        generator = torch.Generator().manual_seed(0)
        rows = 200_000 // size * 20 if size == 27 else 4000
        if size == 27:
            eps = torch.randn(rows, size, generator=generator, dtype=torch.float64)
            largest, own = eps[:, 1:].amax(1), eps[:, 0]
        else:  # the largest of n normals by its inverse distribution
            u = torch.rand(rows, generator=generator, dtype=torch.float64)
            largest = torch.special.ndtri(u ** (1 / (size - 1)))
            own = torch.randn(rows, generator=generator, dtype=torch.float64)
        for value, p in zip(signal.tolist()[1:], kept.tolist()[1:], strict=True):
            seen = float((own + value > largest).double().mean())
            assert abs(seen - p) < 4 * (p * (1 - p) / rows) ** 0.5


def test_dcd_steps_double_and_its_last_time_is_one() -> None:
    method = DCD(sampling_steps=16, steps_per_round=10)
    assert [method.step_size(number) for number in range(5)] == [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    assert method.max_rounds == 5
    alpha = method.alpha(torch.tensor([[0.0], [0.5], [1.0]], dtype=torch.float64), 27)[:, 0]
    assert (alpha.diff() < 0).all()
    assert 0 < float(alpha[-1]) < float(alpha[0]) < 1


# Confidence


def test_the_confidence_term_and_its_gradient_by_hand() -> None:
    """Of a token predicted correctly: the entropy at temperature 1/2 of the probabilities; of others, nothing."""
    method = ConfidenceDistillation(beta=2.0, temperature=0.5)
    logits = torch.tensor([[2.0, 1.0, 0.0, 5.0]], dtype=torch.float64, requires_grad=True)  # the mask's is ignored
    log_x = MDLM().log_probs(logits, torch.zeros(1, 1), VOCAB)
    entropy = ConfidenceLoss(method, MDLM()).entropy(log_x)
    p = torch.tensor([4.0, 2.0, 0.0], dtype=torch.float64).softmax(0)
    expected = float(-(p * p.log()).sum())
    assert float(entropy.detach()) == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    by_hand = torch.cat([-p * (p.log() + expected) / 0.5, torch.zeros(1)])  # d H/d y = -p (log p + H), y = logits/T
    torch.testing.assert_close(gradient[0], by_hand)


def test_the_confidence_loss_is_the_objectives_and_one_term_more() -> None:
    student, _ = networks(MDLM())
    batch = Batch(torch.randint(4, (8, 12), generator=torch.Generator().manual_seed(0)))
    objective = MDLM(exact_mask_counts=True)

    def loss(beta: float, temperature: float = 1.0) -> float:
        method = ConfidenceDistillation(beta=beta, temperature=temperature)
        assert method.refuse(student, objective) is None
        fn = ConfidenceLoss(method, objective)
        return float(fn(student, batch, torch.Generator().manual_seed(1)).total.detach())

    plain = float(objective.training_loss(student, batch, torch.Generator().manual_seed(1)).total.detach())
    assert loss(0.0) == pytest.approx(plain)
    added = []
    level, uniform = objective.sample_level(student, batch, torch.Generator().manual_seed(1))
    z = torch.where(uniform < 1 - level.alpha, 4, batch.tokens)
    log_x = student(z, level.t, z == 4).detach()
    row, position = (z == 4).nonzero().T
    for n in range(len(log_x)):
        if int(log_x[n].argmax()) == int(batch.tokens[row[n], position[n]]):
            p = log_x[n][[0, 1, 2, 3, 5, 6]].exp()
            added.append(float(level.weight[row[n], 0]) * float(-(p * p.log()).sum()))
    assert added
    assert loss(2.0) == pytest.approx(plain + 2 * sum(added))
    assert loss(2.0, 0.5) < loss(2.0)


# What is refused


@pytest.mark.parametrize(
    ("method", "objective", "said"),
    [
        (SDTT(), UniformDiffusion(), "SDTT distils masked diffusion .* trained by UniformDiffusion"),
        (SDTT(), NextToken(), r"trained by NextToken \(autoregression\)"),
        (SDTT(), D3PM(), "probabilities sum to one, and this teacher was trained by D3PM"),
        (SDTT(), BlockDiffusion(block_size=4), r"BlockDiffusion \(block diffusion\)"),
        (SDTT(), GenMD4(), "a schedule for each token"),
        (DCD(), MDLM(), "DCD distils uniform noise"),
        (ConfidenceDistillation(), UniformDiffusion(), "confidence distillation is for masked diffusion"),
        (ConfidenceDistillation(), MDLM(carry_over=False), "that copies visible tokens"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(method: Distillation, objective: Objective, said: str) -> None:
    import re

    reason = method.refuse(tiny_denoiser(objective), objective)
    assert reason is not None
    assert re.search(said, reason)
    assert method.refuse(tiny_denoiser(FITS[type(method)]), FITS[type(method)]) is None


FITS: dict[type, Objective] = {
    SDTT: MDLM(),
    DCD: UniformDiffusion(),
    ConfidenceDistillation: BlockDiffusion(block_size=4),
}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SDTT(sampling_steps=1), "sampling_steps at least 2; got 10000 and 1"),
        (lambda: SDTT(teacher_steps=0), "teacher_steps must be at least 1"),
        (lambda: SDTT(steps_per_round=0), "steps_per_round must be at least 1"),
        (lambda: DCD(gamma_min=1.0, gamma_max=0.0), "gamma_min must be below gamma_max"),
        (lambda: ConfidenceDistillation(beta=-1.0), "beta must be 0 or above"),
        (lambda: SDTT(sampling_steps=16, steps_per_round=10).check_steps(41), "at most 4 rounds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
    SDTT(sampling_steps=16, steps_per_round=10).check_steps(40)
