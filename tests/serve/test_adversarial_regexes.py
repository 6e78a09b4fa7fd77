"""Patterns that were written to do harm: each gets an answer in time, and others do not notice."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from adversarial_regexes import adversarial_regexes
from engine_harness import PendingTasks, canvas_ids, running_engine
from live_server import LiveServer, language_model, live_server, wait_until
from unmask import Guidance
from unmask.guidance.regex.limits import cooperative_yield
from unmask.guidance.regex.token_dfa import TOKEN_DFA_CACHE, TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.sampling.factory import make_sampler
from unmask.serve._engine import DeadlineError, Engine
from unmask.serve._jobs import GeneratedSequence, generation_job
from unmask.serve._structure_compiler import StructureCompiler

SECONDS = 30


def usual(served: LiveServer, count: int) -> list[float]:
    """How long somebody waits who asks for a single token."""
    waited = []
    for seed in range(count):
        began = time.monotonic()
        assert served.post("/v1/infill", template="ab<mask>", steps=1, seed=seed).status_code == 200
        waited.append(time.monotonic() - began)
    return waited


def check_all(wanted: list[str], asking: int) -> None:
    with live_server(language_model()) as served, ThreadPoolExecutor(asking) as pool:
        before = statistics.median(usual(served, 20))

        def ask(pattern: str) -> tuple[int, float]:
            began = time.monotonic()
            body = {"template": "ab<mask:12>c<mask:20>", "steps": 4, "regex": pattern, "timeout": SECONDS}
            status = httpx.post(f"{served.url}/v1/infill", json=body, timeout=3 * SECONDS).status_code
            return status, time.monotonic() - began

        asked = [pool.submit(ask, pattern) for pattern in wanted]
        waited = []
        while not all(each.done() for each in asked):
            waited += usual(served, 1)
        for pattern, each in zip(wanted, asked, strict=True):
            status, seconds = each.result()
            assert status in (200, 400, 422, 504), pattern
            assert seconds < SECONDS + 10, pattern
        print(f"alone {before:.4f} s, beside them {statistics.median(waited):.4f}, longest {max(waited):.2f}")
        assert statistics.median(waited) < 10 * before + 0.2
        assert max(waited) < 5
        assert served.http.get("/health").status_code == 200


def test_some_hostile_patterns() -> None:
    check_all(["(a|b)*a(a|b){13}", *adversarial_regexes()[1::24]], asking=2)


@pytest.mark.slow
def test_a_hundred_hostile_patterns() -> None:
    assert len(adversarial_regexes()) >= 100
    check_all(adversarial_regexes(), asking=4)


def test_a_pattern_is_worked_out_once_elsewhere_and_not_beyond_its_deadline() -> None:
    tokenizer = language_model().tokenizer
    assert tokenizer is not None

    async def ask() -> None:
        compiler = StructureCompiler(tokenizer)
        in_time = time.monotonic() + 60
        found = await compiler.compile(Structure.regex("(ab|c)+d"), in_time)
        process = compiler._process
        assert process is not None
        assert await compiler.compile(Structure.regex("(ab|c)+d"), 0.0) is found  # no work, no time
        with pytest.raises(ValueError, match="not a regular expression"):
            await compiler.compile(Structure.regex("("), in_time)
        assert compiler._process is process
        with pytest.raises(DeadlineError):  # a hundredth of what it takes
            await compiler.compile(Structure.regex("((a|b|c)?d){40}e"), time.monotonic() + 1e-3)
        await process.wait()  # it was ended, and the next one is asked of another
        assert (await compiler.compile(Structure.regex("(ab|c)+f"), in_time)).subject == "the pattern '(ab|c)+f'"
        await compiler.close()

    asyncio.run(ask())
    found = TOKEN_DFA_CACHE.get((Structure.regex("(ab|c)+d"), tokenizer))
    TOKEN_DFA_CACHE.__init__(TOKEN_DFA_CACHE.max_bytes)  # type: ignore[misc]
    own = TokenDFA.compile(Structure.regex("(ab|c)+d"), tokenizer)
    assert found is not None
    assert (found.transitions == own.transitions).all()


def test_who_computes_for_long_pauses_for_others() -> None:
    """A row that never comes to its question: others are asked and answered meanwhile, and it ends late."""
    lm = language_model()
    wanted = generation_job(lm, canvas_ids(lm, 6, 0), make_sampler(lm.denoiser, "first-hitting"), 0)

    def forever(*_: object) -> None:
        while True:
            cooperative_yield()

    with running_engine(lm) as running:
        endless, others = PendingTasks([forever], seconds=2.0), PendingTasks([wanted])
        running.submit(endless.tasks)
        wait_until(lambda: running.iteration_seconds > 0)
        running.submit(others.tasks)
        assert isinstance(others.wait()[0], GeneratedSequence)
        assert not endless.results
        assert isinstance(endless.wait()[0], DeadlineError)


def test_a_row_with_a_large_pattern_is_what_it_is_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.serve._engine._COMPUTE_SLICE_SECONDS", 0.0)  # it pauses wherever it can
    monkeypatch.setattr(Engine, "_compute_slice", lambda *_: 0.0)
    lm = language_model()
    guide, sampler = Guidance(regex="(a|b)*a(a|b){5}"), make_sampler(lm.denoiser, "random-order", 4)
    ids = [*lm.tokenizer.encode("abc"), *[lm.vocab.mask_id] * 12]  # type: ignore[union-attr]
    alone = [lm.generate(torch.tensor([ids]), sampler, seed, guidance=guide).tokens[0].tolist() for seed in (1, 2)]
    with running_engine(lm) as running:
        waiting = PendingTasks([generation_job(lm, ids, sampler, seed, guidance=guide) for seed in (1, 2)])
        running.submit(waiting.tasks)
        assert [list(row.ids) for row in waiting.wait()] == alone


def test_one_that_computes_for_long_does_not_hold_up_another() -> None:
    def compute(seconds: float) -> Callable[..., float]:
        def job(*_: object) -> float:
            end = time.process_time() + seconds
            while time.process_time() < end:
                cooperative_yield()
            return time.monotonic()

        return job

    with running_engine() as running:
        long, short = PendingTasks([compute(1.5)]), PendingTasks([compute(0.1)])
        running.submit(long.tasks)
        running.submit(short.tasks)
        assert short.wait()[0] < long.wait()[0] - 0.5


def test_computing_gets_its_share_of_the_time_that_network_calls_take() -> None:
    """A job that computes for 0.3 s beside one whose calls take 0.1 s each has half of that after each call: with no
    more than the shortest slice, it would have to wait for thirty calls."""
    lm = language_model()
    inner = lm.denoiser.forward

    def slow(*inputs: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return inner(*inputs, **options)

    lm.denoiser.forward = slow  # type: ignore[method-assign]

    def compute(*_: object) -> float:
        for _step in range(300):
            time.sleep(0.001)
            cooperative_yield()
        return running.metrics.registry.get_sample_value("unmask_forward_passes_total") or 0.0

    with running_engine(lm) as running:
        sampler = make_sampler(lm.denoiser, "first-hitting")
        ids = [lm.vocab.mask_id] * 40
        calls = PendingTasks([generation_job(lm, ids, sampler, 1)])
        running.submit(calls.tasks)
        wait_until(lambda: running.metrics.registry.get_sample_value("unmask_forward_passes_total") == 1)
        computing = PendingTasks([compute])
        running.submit(computing.tasks)
        (num_calls,) = computing.wait()
        running.cancel(calls.tasks)
    assert num_calls < 20
