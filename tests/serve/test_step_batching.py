"""Questions of many in one call: the answers are those that each would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from unmask import MDLM, DiTConfig, ModelConfig, Vocab
from unmask.backbones.dit import LocalInit
from unmask.context import CacheView, Context
from unmask.diffusion.categorical import SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import DenoiserLike
from unmask.model import Denoiser
from unmask.sampling import Confidence, EntropyBounded, Threshold
from unmask.sampling._row_fns import DrawTokens, DrawWithConfidence
from unmask.serve import _step_batching as batching
from unmask.serve._step_batching import ForwardCall, SamplerCoroutine, run_batch, select_batch

VOCAB = Vocab(7, 6)


class Unmergeable(CacheView):
    @property
    def start(self) -> int:
        return 0


def question(length: int, seed: int, rows: int = 1, **context: Any) -> ForwardCall:
    random = torch.Generator().manual_seed(seed)
    z = torch.randint(7, (rows, length), generator=random)
    z[:, 0] = 6
    t = torch.rand(rows, 1, generator=random, dtype=torch.float64)
    return ForwardCall(z, t, z == 6, None, Context(**context))


def denoiser(kind: str) -> Denoiser:
    if kind != "local":
        return tiny_models.tiny_denoiser(MDLM(), mask=6, time_conditioned=kind == "timed", length=40)
    torch.manual_seed(0)
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=40, dropout=0.0, local_init=LocalInit(kernel_size=5))
    return ModelConfig(VOCAB, backbone, MDLM()).build().double().eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["plain", "timed", "local"])
@pytest.mark.parametrize("lengths", [(9, 9, 9), (5, 17, 32, 1)])
def test_answers_are_those_that_each_would_get_alone(kind: str, lengths: tuple[int, ...]) -> None:
    net = denoiser(kind)
    questions = [question(length, seed=n, rows=1 + n % 2) for n, length in enumerate(lengths)]
    calls = []

    class Watched(tiny_models.CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Any, context: Context, **options: Any) -> Tensor:  # type: ignore[override]
            calls.append((tuple(z.shape), context.valid is not None))
            return super().__call__(z, t, positions, context, **options)

    answers = run_batch(Watched(net), questions)
    assert calls == [((sum(len(q.z) for q in questions), max(lengths)), len(set(lengths)) > 1)]
    for asked, answer in zip(questions, answers, strict=True):
        torch.testing.assert_close(answer, net(asked.z, asked.t, asked.positions), rtol=1e-10, atol=1e-10)


def test_who_wants_the_same_of_the_lines_is_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of two kinds, a judgement, whole lines and something that cannot be joined."""
    net = denoiser("plain")
    drawn: list[int] = []

    def watched(weights: Tensor, *rest: Any, **options: Any) -> Tensor:
        drawn.append(len(weights))
        return sample_inverse_cdf(weights, *rest, **options)

    monkeypatch.setattr("unmask.sampling._row_fns.sample_inverse_cdf", watched)
    sampler = Confidence(steps=3)
    questions = []
    for n in range(9):
        asked = question(3 + n, seed=n)
        uniform = torch.rand(asked.num_queries, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        draw, greedy = (
            DrawTokens(SamplingParams(), uniform, 6),
            DrawTokens(SamplingParams(temperature=0), uniform, 6),
        )
        surprise = partial(_first_column, asked.num_queries)
        wanted = (
            draw,
            greedy,
            DrawWithConfidence(draw, (sampler.measure,), True),
            None,
            surprise,
            draw,
        )[n % 6]
        questions.append(replace(asked, row_fn=wanted))
    alone = [net(asked.z, asked.t, asked.positions, row_fn=asked.row_fn) for asked in questions]
    drawn.clear()
    for answer, own in zip(run_batch(net, questions), alone, strict=True):
        torch.testing.assert_close(answer, own, rtol=1e-10, atol=1e-10)
    kinds = [(0, 5, 6), (1, 7), (2, 8)]
    assert drawn == [sum(questions[n].num_queries for n in kind) for kind in kinds]
    drawn.clear()
    monkeypatch.setattr(batching, "_MAX_ROW_FN_LOGITS", 7 * sum(questions[n].num_queries for n in (0, 5)))
    for answer, own in zip(run_batch(net, questions), alone, strict=True):
        torch.testing.assert_close(answer, own, rtol=1e-10, atol=1e-10)
    assert max(drawn[:2]) <= sum(questions[n].num_queries for n in (0, 5))
    assert len(drawn) > len(kinds)


def _first_column(lines: int, log_x: Tensor, part: slice | Tensor) -> Tensor:
    assert len(log_x) == lines
    return log_x[:, 0]


def test_judgements_by_different_measures_are_not_joined() -> None:
    draw = DrawTokens(SamplingParams(), torch.zeros(1, dtype=torch.float64), 6)
    one, same, other = (
        DrawWithConfidence(draw, (sampler.measure,), True) for sampler in (Confidence(8), Threshold(), EntropyBounded())
    )
    assert one.batch_key == same.batch_key
    assert one.batch_key != other.batch_key
    assert DrawWithConfidence(draw, (Confidence(8).measure,), False).batch_key != one.batch_key


@pytest.mark.parametrize("by_index", [(0,), (1, 2), (0, 1, 2)])
def test_rows_may_be_asked_by_index(by_index: tuple[int, ...]) -> None:
    net = denoiser("plain")
    questions = [question(4 + 3 * n, seed=n, rows=2) for n in range(3)]
    for n in by_index:
        sequence, place = questions[n].positions.nonzero(as_tuple=True)  # type: ignore[union-attr]
        questions[n] = replace(questions[n], positions=(sequence.flip(0), place.flip(0)))
    assert select_batch(questions, 8, 7) == [0, 1, 2]
    for asked, answer in zip(questions, run_batch(net, questions), strict=True):
        torch.testing.assert_close(answer, net(asked.z, asked.t, asked.positions), rtol=1e-10, atol=1e-10)


def test_times_of_single_positions_stay_with_them() -> None:
    net = denoiser("timed")
    one, other = question(6, 0), question(9, 1)
    one = ForwardCall(one.z, torch.linspace(0, 1, 6, dtype=torch.float64)[None], one.positions, None)
    for asked, answer in zip((one, other), run_batch(net, [one, other]), strict=True):
        torch.testing.assert_close(answer, net(asked.z, asked.t, asked.positions), rtol=1e-10, atol=1e-10)


def test_who_has_waited_longest_is_first_and_takes_along_who_fits() -> None:
    short, long, peculiar = question(5, 0), question(70, 1), question(5, 2, cache=Unmergeable())
    assert select_batch([short, long, short, peculiar, short], 8, 7) == [0, 2, 4]
    assert select_batch([long, short, long], 8, 7) == [0, 2]
    assert select_batch([peculiar, short, peculiar], 8, 7) == [0]
    assert select_batch([short] * 5, 3, 7) == [0, 1, 2]


def test_answers_of_one_call_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [question(5, n) for n in range(4)]
    monkeypatch.setattr(batching, "_MAX_BATCH_LOGITS", 7 * (several[0].num_queries + several[1].num_queries))
    assert select_batch(several, 100, 7) == [0, 1]
    monkeypatch.setattr(batching, "_MAX_BATCH_LOGITS", 1)
    assert select_batch(several, 100, 7) == [0]  # somebody must be next


def test_a_conversation_pauses_at_each_question_and_ends() -> None:
    net = denoiser("plain")
    heard: list[float] = []

    def work(denoiser: DenoiserLike) -> None:
        for length in (3, 4):
            asked = question(length, 0)
            heard.append(float(denoiser(asked.z, asked.t, asked.positions).sum()))

    talk = SamplerCoroutine(work, net)
    talk.start()
    assert talk.pending_call is not None
    assert talk.pending_call.z.shape == (1, 3)
    talk.send(torch.tensor([2.0]))
    assert heard == [2.0]
    assert talk.pending_call.z.shape == (1, 4)
    talk.send(torch.tensor([5.0]))
    assert heard == [2.0, 5.0]
    assert talk.pending_call is None


def test_who_leaves_cleans_up_and_errors_come_out() -> None:
    ended: list[str] = []

    def steps(denoiser: DenoiserLike) -> Iterator[None]:
        asked = question(3, 0)
        try:
            while True:
                denoiser(asked.z, asked.t, asked.positions)
                yield
        finally:
            ended.append("left")

    talk = SamplerCoroutine(lambda denoise: [None for _ in steps(denoise)] and None, denoiser("plain"))
    talk.start()
    talk.cancel()
    assert (ended, talk.pending_call) == (["left"], None)

    def broken(_: DenoiserLike) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        SamplerCoroutine(broken, denoiser("plain")).start()
