"""Whatever others ask for, a short request waits for a few calls of the network; counted, not timed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from engines import Gate, Waiting, canvas, engine
from served import language_model, until
from unmask import LanguageModel
from unmask.serve.engine import BusyError
from unmask.serve.rows import Row, writing

LONG = 140


def counted(lm: LanguageModel) -> list[int]:
    """Its length grows with every call: how many rows were in it."""
    calls: list[int] = []
    inner = lm.denoise.forward

    def forward(z: Tensor, *rest: Any, **context: Any) -> Tensor:
        calls.append(len(z))
        return inner(z, *rest, **context)

    lm.denoise.forward = forward  # type: ignore[method-assign]
    return calls


def calls_until_done(
    lm: LanguageModel, crowd: list[list[Any]], short: Any, rows: int, newcomers: int = 1
) -> list[int]:
    """The calls between a request's arrival and its end, for several that arrive at once in a crowd."""
    calls, gate = counted(lm), Gate(lm)
    ended: dict[int, int] = {}
    with engine(lm, rows=rows, queue=1000) as running:
        everybody = [Waiting(works) for works in crowd]
        for waiting in everybody:
            running.submit(waiting.tasks)
        until(lambda: gate.waits == 1)
        gate.open.set()
        until(lambda: len(calls) >= 20)  # all have begun, and run
        gate.open.clear()
        waits = gate.waits
        until(lambda: gate.waits > waits)
        before = len(calls)
        for number in range(newcomers):
            new = Waiting([short])
            new.tasks[0].on_done = lambda result, number=number: ended.__setitem__(  # type: ignore[misc]
                number, len(calls) if isinstance(result, Row) else 10**6
            )
            running.submit(new.tasks)
        gate.open.set()
        until(lambda: len(ended) == newcomers)
        assert not any(waiting.results for waiting in everybody)
        for waiting in everybody:
            running.give_up(waiting.tasks)
    return [ended[number] - before for number in range(newcomers)]


def long_rows(lm: LanguageModel, count: int, **options: Any) -> list[Any]:
    sampler = lm.sampler("first-hitting") if not options else lm.sampler("confidence", 8, **options)
    return [writing(lm, [lm.vocab.mask] * LONG, sampler, seed) for seed in range(count)]


CROWDS: dict[str, Any] = {
    "two requests of sixteen rows": lambda lm: [long_rows(lm, 16)] * 2,
    "sixty requests of one row": lambda lm: [long_rows(lm, 1)] * 60,
    "rows with caches of their own, each alone in a call": lambda lm: (
        [long_rows(lm, 8, block=70, cache="dual")] * 4
    ),
    "rows of other lengths": lambda lm: [
        long_rows(lm, 4),
        [writing(lm, canvas(lm, 40, 1), lm.sampler("first-hitting"), 0)] * 8,
        long_rows(lm, 2, block=70, cache="prefix"),
    ],
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_short_request_waits_for_a_few_calls(crowd: str) -> None:
    lm = language_model(length=LONG)
    short = writing(lm, canvas(lm, 1, 0), lm.sampler("default", 1), 0)
    (calls,) = calls_until_done(lm, CROWDS[crowd](lm), short, rows=8)
    assert calls <= 3


def test_several_newcomers_do_not_wait_for_each_other_long() -> None:
    """Of a call's eight rows four are for those who have had the least."""
    lm = language_model(length=LONG)
    short = writing(lm, canvas(lm, 1, 0), lm.sampler("default", 1), 0)
    calls = calls_until_done(lm, [long_rows(lm, 1)] * 40, short, rows=8, newcomers=12)
    assert max(calls) <= 12


def test_who_is_long_goes_on_among_any_number_of_newcomers() -> None:
    """Beside an endless stream of short requests, more than there is room for, a long one ends, too."""
    lm = language_model()
    calls = counted(lm)
    long = Waiting([writing(lm, canvas(lm, 12, 0), lm.sampler("first-hitting"), 0)])
    work = writing(lm, canvas(lm, 1, 0), lm.sampler("default", 1), 0)
    with engine(lm, rows=2, queue=30) as running:

        def another(_: Any) -> None:
            """In the engine's thread: as one ends, the next one is there."""
            if not long.results:
                running.submit(stream())

        def stream() -> list[Any]:
            new = Waiting([work])
            new.tasks[0].on_done = another
            return new.tasks

        for _ in range(20):
            running.submit(stream())
        running.submit(long.tasks)
        before = len(calls)
        assert isinstance(long.wait()[0], Row)
        taken = len(calls) - before
    assert taken <= 12 * 12  # two rows of a call for twenty-one


def test_what_is_there_is_bounded_however_it_is_divided() -> None:
    lm = language_model()
    gate = Gate(lm)
    work = writing(lm, canvas(lm, 4, 0), lm.sampler("default", 2), 0)
    with engine(lm, rows=2, queue=6) as running:
        several = [Waiting([work]) for _ in range(8)]
        for waiting in several:
            running.submit(waiting.tasks)
            time.sleep(0.01)
        with pytest.raises(BusyError):
            running.submit(Waiting([work]).tasks)
        gate.open.set()
        for waiting in several:
            waiting.wait()
        running.submit((late := Waiting([work] * 8)).tasks)
        late.wait()
