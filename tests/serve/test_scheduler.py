"""Whatever others ask for, a short request waits for a few calls of the network; counted, not timed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from engine_harness import GatedNetwork, PendingTasks, canvas_ids, running_engine
from live_server import language_model, wait_until
from unmask import LanguageModel
from unmask.sampling.factory import make_sampler
from unmask.serve._engine import QueueFullError
from unmask.serve._jobs import GeneratedSequence, generation_job

LONG = 140


def counted(lm: LanguageModel) -> list[int]:
    """Its length grows with every call: how many rows were in it."""
    calls: list[int] = []
    inner = lm.denoiser.forward

    def forward(z: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append(len(z))
        return inner(z, *rest, **options)

    lm.denoiser.forward = forward  # type: ignore[method-assign]
    return calls


def calls_until_done(lm: LanguageModel, crowd: list[list[Any]], short: Any, rows: int, newcomers: int = 1) -> list[int]:
    """The calls between a request's arrival and its end, for several that arrive at once in a crowd."""
    calls, gate = counted(lm), GatedNetwork(lm)
    ended: dict[int, int] = {}
    with running_engine(lm, max_batch=rows, max_queue=1000) as running:
        everybody = [PendingTasks(works) for works in crowd]
        for waiting in everybody:
            running.submit(waiting.tasks)
        wait_until(lambda: gate.num_calls == 1)
        gate.open.set()
        wait_until(lambda: len(calls) >= 20)  # all have begun, and run
        gate.open.clear()
        waits = gate.num_calls
        wait_until(lambda: gate.num_calls > waits)
        before = len(calls)
        for number in range(newcomers):
            new = PendingTasks([short])
            new.tasks[0].on_done = lambda result, number=number: ended.__setitem__(  # type: ignore[misc]
                number, len(calls) if isinstance(result, GeneratedSequence) else 10**6
            )
            running.submit(new.tasks)
        gate.open.set()
        wait_until(lambda: len(ended) == newcomers)
        assert not any(waiting.results for waiting in everybody)
        for waiting in everybody:
            running.cancel(waiting.tasks)
    return [ended[number] - before for number in range(newcomers)]


def long_rows(lm: LanguageModel, count: int, **options: Any) -> list[Any]:
    sampler = (
        make_sampler(lm.denoiser, "first-hitting")
        if not options
        else make_sampler(lm.denoiser, "confidence", 64, **options)
    )
    return [generation_job(lm, [lm.vocab.mask_id] * LONG, sampler, seed) for seed in range(count)]


CROWDS: dict[str, Any] = {
    "two requests of sixteen rows": lambda lm: [long_rows(lm, 16)] * 2,
    "sixty requests of one row": lambda lm: [long_rows(lm, 1)] * 60,
    "rows with caches of their own": lambda lm: [long_rows(lm, 8, block_size=70, cache="dual")] * 4,
    "rows of other lengths": lambda lm: [
        long_rows(lm, 4),
        [generation_job(lm, canvas_ids(lm, 40, 1), make_sampler(lm.denoiser, "first-hitting"), 0)] * 8,
        long_rows(lm, 2, block_size=70, cache="prefix"),
    ],
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_short_request_waits_for_a_few_calls(crowd: str) -> None:
    lm = language_model(length=LONG)
    short = generation_job(lm, canvas_ids(lm, 1, 0), make_sampler(lm.denoiser, "default", 1), 0)
    (calls,) = calls_until_done(lm, CROWDS[crowd](lm), short, rows=8)
    assert calls <= 3


def test_several_newcomers_do_not_wait_for_each_other_long() -> None:
    """Of a call's eight rows four are for those who have had the least."""
    lm = language_model(length=LONG)
    short = generation_job(lm, canvas_ids(lm, 1, 0), make_sampler(lm.denoiser, "default", 1), 0)
    calls = calls_until_done(lm, [long_rows(lm, 1)] * 40, short, rows=8, newcomers=12)
    assert max(calls) <= 12


def test_who_is_long_goes_on_among_any_number_of_newcomers() -> None:
    """Beside an endless stream of short requests, more than there is room for, a long one ends, too."""
    lm = language_model()
    calls = counted(lm)
    long = PendingTasks([generation_job(lm, canvas_ids(lm, 12, 0), make_sampler(lm.denoiser, "first-hitting"), 0)])
    work = generation_job(lm, canvas_ids(lm, 1, 0), make_sampler(lm.denoiser, "default", 1), 0)
    with running_engine(lm, max_batch=2, max_queue=30) as running:

        def another(_: Any) -> None:
            """In the engine's thread: as one ends, the next one is there."""
            if not long.results:
                running.submit(stream())

        def stream() -> list[Any]:
            new = PendingTasks([work])
            new.tasks[0].on_done = another
            return new.tasks

        for _ in range(20):
            running.submit(stream())
        running.submit(long.tasks)
        before = len(calls)
        assert isinstance(long.wait()[0], GeneratedSequence)
        taken = len(calls) - before
    assert taken <= 12 * 12  # two rows of a call for twenty-one


def test_what_is_there_is_bounded_however_it_is_divided() -> None:
    lm = language_model()
    gate = GatedNetwork(lm)
    work = generation_job(lm, canvas_ids(lm, 4, 0), make_sampler(lm.denoiser, "default", 2), 0)
    with running_engine(lm, max_batch=2, max_queue=6) as running:
        several = [PendingTasks([work]) for _ in range(8)]
        for waiting in several:
            running.submit(waiting.tasks)
            time.sleep(0.01)
        with pytest.raises(QueueFullError):
            running.submit(PendingTasks([work]).tasks)
        gate.open.set()
        for waiting in several:
            waiting.wait()
        running.submit((late := PendingTasks([work] * 8)).tasks)
        late.wait()
