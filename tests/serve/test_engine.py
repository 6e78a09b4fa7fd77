"""Rows come and go between calls; each gets what it would get alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import Gate, Waiting, canvas, engine
from served import language_model, until
from unmask.diffusion.denoise import Around, Denoise
from unmask.guidance import Guidance
from unmask.sampling import BY_NAME
from unmask.serve.engine import BusyError, ClosedError, Engine, InternalError, LateError
from unmask.serve.metrics import Metrics
from unmask.serve.rows import Row, scoring, writing


def test_in_company_a_row_is_what_it_is_alone() -> None:
    """Rows of all samplers and of many lengths, which join while others run."""
    lm = language_model()
    plans = [
        (canvas(lm, 3 + 5 * (n % 6), n), lm.sampler(name, steps=5 + n), 100 + n)
        for n, name in enumerate(["default", *BY_NAME, *BY_NAME])
    ]
    alone = [lm.fill(torch.tensor([ids]), sampler, seed).tokens[0].tolist() for ids, sampler, seed in plans]
    with engine(lm) as running:
        works = [writing(lm, ids, sampler, seed) for ids, sampler, seed in plans]
        first, second = Waiting(works[::2]), Waiting(works[1::2])
        running.submit(first.tasks)
        until(lambda: any(first.told.values()))
        running.submit(second.tasks)
        rows: list[Row] = [None] * len(works)  # type: ignore[list-item]
        rows[::2], rows[1::2] = first.wait(), second.wait()
        batches = running.metrics.text().decode()
    assert [list(row.ids) for row in rows] == alone
    alone_in_a_call, calls = (
        float(next(line for line in batches.splitlines() if line.startswith(name)).split()[-1])
        for name in ('unmask_batch_rows_bucket{le="1.0"}', "unmask_batch_rows_count")
    )
    assert alone_in_a_call < calls / 2  # or nobody was in company
    for row, (ids, _, _) in zip(rows, plans, strict=True):
        for place, id_ in enumerate(ids):
            given = id_ != lm.vocab.mask
            assert (row.steps[place] == 0) == given
            assert (row.marks[place] is None) == given


def test_scores_are_those_of_the_library_and_wait_for_nobody() -> None:
    lm = language_model()
    text = "abc abc def"
    ids = lm.tokenizer.encode(text)  # type: ignore[union-attr]
    with engine(lm) as running:
        waiting = Waiting([scoring(lm, ids, 64, 3), writing(lm, canvas(lm, 9, 1), lm.sampler("default"), 0)])
        running.submit(waiting.tasks)
        score, _ = waiting.wait()
    expected = lm.score(text, draws=64, seed=3)
    assert score.nats == pytest.approx(expected.nats)
    assert sum(score.token_nats) == pytest.approx(score.nats)
    assert len(score.token_nats) == len(ids)


def test_each_token_has_the_probability_that_it_was_drawn_with() -> None:
    """Where all but one position is given, the network can be asked again; alone and in company."""
    lm = language_model()
    texts = [[*lm.tokenizer.encode(text), lm.vocab.mask] for text in ("abc", "fed", "a cab", "hedge")]  # type: ignore[union-attr]
    kinds = ["default", "confidence", "default", "confidence"]
    # Guidance asks about a text whose condition is hidden as well; what is told is of the one with it.
    guides = [None, None, Guidance(scale=1.5), None]
    works = [
        writing(lm, ids, lm.sampler(name, 4), 5, alternatives=3, guide=guide)
        for ids, name, guide in zip(texts, kinds, guides, strict=True)
    ]
    for together in (works[:1], works):
        with engine(lm) as running:
            waiting = Waiting(together)
            running.submit(waiting.tasks)
            rows = waiting.wait()
        for ids, row in zip(texts, rows, strict=False):
            z = torch.tensor([ids])
            log_x = lm.denoise(z, torch.ones(1, 1, dtype=torch.float64), z == lm.vocab.mask)[0].detach()
            mark = row.marks[-1]
            assert mark.logprob == pytest.approx(float(log_x[row.ids[-1]]), rel=1e-5)
            best = log_x.topk(3)
            assert [id_ for id_, _ in mark.alternatives] == best.indices.tolist()
            assert [p for _, p in mark.alternatives] == pytest.approx(best.values.exp().tolist(), rel=1e-5)


def test_a_full_queue_takes_nothing_of_a_request() -> None:
    lm = language_model()
    gate = Gate(lm)
    work = writing(lm, canvas(lm, 4, 0), lm.sampler("default", 2), 0)
    with engine(lm, rows=1, queue=3) as running:
        busy = Waiting([work] * 3)
        running.submit(busy.tasks[:1])
        until(lambda: gate.waits == 1)
        running.submit(busy.tasks[1:])
        with pytest.raises(BusyError) as told:
            running.submit(Waiting([work] * 2).tasks)
        assert told.value.retry_after >= 1
        running.submit(extra := Waiting([work]).tasks)
        gate.open.set()
        busy.wait()
        running.give_up(extra)


def test_who_is_gone_or_late_leaves_before_the_next_call() -> None:
    lm = language_model()
    gate = Gate(lm)
    work = writing(lm, canvas(lm, 8, 0), lm.sampler("first-hitting"), 0)
    with engine(lm) as running:
        gone, late, stays = Waiting([work]), Waiting([work], seconds=0.2), Waiting([work])
        queued = Waiting([work], seconds=0.0)
        for each in (gone, late, stays, queued):
            running.submit(each.tasks)
        until(lambda: gate.waits == 1)
        running.give_up(gone.tasks)
        time.sleep(0.25)
        gate.open.set()
        assert isinstance(late.wait()[0], LateError)
        assert isinstance(queued.wait()[0], LateError)
        assert isinstance(stays.wait()[0], Row)
        assert gone.results == {}
        assert len(gone.told[0]) <= 1
        until(lambda: b"unmask_running_rows 0.0" in running.metrics.text())


def test_what_goes_wrong_concerns_only_whom_it_concerns() -> None:
    lm = language_model()

    def broken(denoise: Denoise, _tell: Any) -> None:
        raise ValueError("this one is wrong")

    class Unhappy(Around):
        def __call__(self, z: Tensor, t: Tensor, rows: Any, **context: Any) -> Tensor:
            return self.denoise(z, t, rows, each=lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]

    fine = writing(lm, canvas(lm, 4, 0), lm.sampler("default", 4), 0)
    late = writing(
        lm, canvas(lm, 4, 0), lm.sampler("default", 4), 0, guide=lambda denoise, *_: Unhappy(denoise)
    )
    with engine(lm) as running:
        mixed = Waiting([fine, broken, late, fine])
        running.submit(mixed.tasks)
        good, bad, also_bad, also_good = mixed.wait()
        assert (str(bad), good.ids) == ("this one is wrong", also_good.ids)
        assert isinstance(also_bad, InternalError)
        with torch.no_grad():
            lm.denoise.backbone.output.bias[0] = float("nan")
        damaged = Waiting([fine])
        running.submit(damaged.tasks)
        assert "damaged" in str(damaged.wait()[0])
        with torch.no_grad():
            lm.denoise.backbone.output.bias[0] = 0.0
        again = Waiting([fine])
        running.submit(again.tasks)
        assert isinstance(again.wait()[0], Row)


def test_where_memory_runs_out_the_calls_get_smaller() -> None:
    lm = language_model()
    inner = lm.denoise.forward

    def forward(z: Tensor, *rest: Any, **context: Any) -> Tensor:
        if len(z) > 2:
            raise torch.OutOfMemoryError("can't allocate memory")
        return inner(z, *rest, **context)

    work = writing(lm, canvas(lm, 6, 0), lm.sampler("first-hitting"), 0)
    expected = lm.fill(torch.tensor([canvas(lm, 6, 0)]), lm.sampler("first-hitting"), 0).tokens[0].tolist()
    lm.denoise.forward = forward  # type: ignore[method-assign]
    with engine(lm) as running:
        waiting = Waiting([work] * 7)
        running.submit(waiting.tasks)
        assert all(list(row.ids) == expected for row in waiting.wait())
        assert running.rows <= 2


def test_nobody_starves() -> None:
    """A row of its own length gets its turn among many others, as often as they do."""
    lm = language_model()
    crowd = [writing(lm, canvas(lm, 3, 0), lm.sampler("first-hitting"), n) for n in range(12)]
    lonely = writing(lm, canvas(lm, 36, 8), lm.sampler("first-hitting"), 0)
    with engine(lm, rows=4) as running:
        waiting = Waiting([*crowd[:6], lonely, *crowd[6:]])
        running.submit(waiting.tasks)
        waiting.wait()
        order = list(waiting.results)
    assert len(waiting.told[6]) == 36
    assert order.index(0) < order.index(6)


def test_closing_finishes_what_there_is_or_says_that_it_will_not() -> None:
    lm = language_model()
    work = writing(lm, canvas(lm, 6, 0), lm.sampler("first-hitting"), 0)
    running = Engine(lambda: lm, Metrics())
    patient = Waiting([work] * 3)
    running.submit(patient.tasks)
    running.close(patience=20)
    assert all(isinstance(row, Row) for row in patient.wait())
    with pytest.raises(ClosedError):
        running.submit(patient.tasks)

    gated = language_model()
    gate = Gate(gated)
    hasty = Engine(lambda: gated, Metrics())
    waiting = Waiting([writing(gated, canvas(gated, 6, 0), gated.sampler("first-hitting"), 0)] * 2)
    hasty.submit(waiting.tasks)
    until(lambda: gate.waits == 1)
    closing = threading.Thread(target=hasty.close)
    closing.start()
    time.sleep(0.1)
    gate.open.set()
    closing.join()
    assert all(isinstance(result, ClosedError) for result in waiting.wait())
