"""Caches of many requests in one call: each gets what it would get alone, whoever joins and leaves meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cached_setups import IN_BLOCKS, SETUPS, VOCAB, Conversation, alone, canvas, network
from engine_harness import PendingTasks, running_engine
from live_server import language_model
from unmask import BlockDiffusion, NextToken
from unmask.context import Context
from unmask.objectives import Objective
from unmask.sampling import Autoregressive
from unmask.sampling.canvas import Canvas
from unmask.serve._engine import InternalError
from unmask.serve._jobs import generation_job
from unmask.serve._step_batching import ForwardCall, run_batch, select_batch

every_setup = pytest.mark.parametrize("name", SETUPS)


def together(name: str, texts: list[Canvas], arrivals: list[int], seed: int) -> tuple[list[Conversation], list[int]]:
    """Conversations that begin after some rounds each, in batches of whoever fits a chosen one; and their sizes."""
    talks, chance, sizes, turn = [Conversation(name, text) for text in texts], random.Random(seed), list[int](), 0
    started: list[Conversation] = []
    while len(started) < len(talks) or any(not talk.coroutine.finished for talk in started):
        for talk, arrival in zip(talks, arrivals, strict=True):
            if arrival <= turn and talk not in started:
                talk.coroutine.start()
                started.append(talk)
        turn += 1
        waiting = [talk for talk in started if not talk.coroutine.finished]
        chance.shuffle(waiting)
        if waiting:
            chosen = [waiting[index] for index in select_batch([talk.call() for talk in waiting], 8, VOCAB.size)]
            sizes.append(len(chosen))
            for talk, output in zip(chosen, run_batch(network(name), [talk.call() for talk in chosen]), strict=True):
                talk.answer(output)
    return talks, sizes


@every_setup
def test_every_row_is_what_it_is_alone(name: str) -> None:
    texts = [canvas(prompt, holes, seed) for seed, (prompt, holes) in enumerate([(5, 9), (0, 6), (14, 11), (6, 7)])]
    with torch.no_grad():
        talks, sizes = together(name, texts, [0, 0, 1, 3], seed=0)
        for talk, text in zip(talks, texts, strict=True):
            own = alone(name, text)
            assert torch.equal(talk.tokens, own.tokens)
            for heard, expected in zip(talk.heard, own.heard, strict=True):
                torch.testing.assert_close(heard, expected, rtol=1e-9, atol=1e-9)
    assert max(sizes) > 2


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["next token", "recurrent", "blocks", "dual"]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 6)), min_size=2, max_size=5),
    st.integers(0, 99),
)
def test_whoever_joins_and_leaves(name: str, rows: list[tuple[int, int, int]], seed: int) -> None:
    texts = [canvas(prompt, holes, number) for number, (prompt, holes, _) in enumerate(rows)]
    with torch.no_grad():
        talks, _ = together(name, texts, [arrival for *_, arrival in rows], seed)
        for talk, text in zip(talks, texts, strict=True):
            assert torch.equal(talk.tokens, alone(name, text).tokens)


@every_setup
def test_a_call_that_failed_can_be_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after memory ran out in the last layer: nothing was cached of it."""
    model, texts = network(name), [canvas(5, 6, 0), canvas(7, 6, 1)]
    talks = [Conversation(name, text) for text in texts]
    with torch.no_grad():
        for talk in talks:
            talk.coroutine.start()
        inner, num_failed = model.backbone.compute_logits, 0

        def out_of_memory(hidden: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("can't allocate memory")

        while waiting := [talk for talk in talks if not talk.coroutine.finished]:
            chosen = [waiting[index] for index in select_batch([talk.call() for talk in waiting], 8, VOCAB.size)]
            calls = [talk.call() for talk in chosen]
            if len(calls) > 1:
                monkeypatch.setattr(model.backbone, "compute_logits", out_of_memory)
                with pytest.raises(torch.OutOfMemoryError):
                    run_batch(model, calls)
                monkeypatch.setattr(model.backbone, "compute_logits", inner)
                num_failed += 1
            for talk, output in zip(chosen, run_batch(model, calls), strict=True):
                talk.answer(output)
        assert num_failed > 2
        assert all(torch.equal(talk.tokens, alone(name, text).tokens) for talk, text in zip(talks, texts, strict=True))


def test_only_calls_of_about_one_length_share_a_call() -> None:
    """Beside a cache a call reads a prompt or a token: nobody is padded to another's prompt."""
    net = network("next token")

    def call(length: int, cached: int = 0) -> ForwardCall:
        kept = net.new_cache()
        z = torch.zeros(1, max(length, cached), dtype=torch.int64)
        t, last = torch.zeros(1, 1), torch.zeros(1, max(length, cached), dtype=torch.bool)
        if cached:
            net(z[:, :cached], t, last[:, :cached] | True, Context(cache=kept.view()))
        return ForwardCall(z[:, :length], t, last[:, :length], None, Context(cache=kept.view()))

    with torch.no_grad():
        token, other, prompt, longer = call(1, 3), call(1, 20), call(9), call(18)
        assert select_batch([token, prompt, other, longer], 8, 7) == [0, 2]
        assert select_batch([prompt, token, longer], 8, 7) == [0, 2]
        plain = ForwardCall(token.z, token.t, token.positions, None)
        assert select_batch([token, plain, other], 8, 7) == [0, 2]


@pytest.mark.parametrize(
    "objective", [NextToken(), BlockDiffusion(block_size=4)], ids=lambda objective: type(objective).__name__
)
def test_the_engine_shares_calls_and_keeps_errors_apart(objective: Objective) -> None:
    lm = language_model(objective)
    sampler = Autoregressive() if isinstance(objective, NextToken) else IN_BLOCKS
    bad_id, inner = 3, lm.denoiser.forward

    def forward(z: Tensor, *rest: Any, **options: Any) -> Tensor:
        if bool((z == bad_id).any()):
            raise RuntimeError("broken for those with this token")
        return inner(z, *rest, **options)

    mask = lm.vocab.mask_id
    texts = [[token, 1, token, 2, 1][: 2 + seed % 4] + [mask] * (9 + seed) for seed, token in enumerate([1, 2, 4, 5])]
    alone = [lm.generate(torch.tensor([ids]), sampler, seed).tokens[0].tolist() for seed, ids in enumerate(texts)]
    assert not any(bad_id in tokens for tokens in alone), "choose another token"
    lm.denoiser.forward = forward  # type: ignore[method-assign]
    jobs = [generation_job(lm, ids, sampler, seed) for seed, ids in enumerate(texts)]
    with running_engine(lm) as running:
        waiting = PendingTasks([*jobs[:2], generation_job(lm, [bad_id, 1] + [mask] * 9, sampler, 0), *jobs[2:]])
        running.submit(waiting.tasks)
        first, second, failed, *others = waiting.wait()
        assert isinstance(failed, InternalError)
        assert [list(row.ids) for row in (first, second, *others)] == alone
        metrics = running.metrics.render().decode()
    calls = float(metrics.split("\nunmask_forward_passes_total ")[1].split()[0])
    rows = float(metrics.split("\nunmask_batch_size_sum ")[1].split()[0])
    assert rows / calls > 2
