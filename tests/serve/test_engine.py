"""Rows come and go between calls; each gets what it would get alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_harness import GatedNetwork, PendingTasks, canvas_ids, running_engine
from live_server import language_model, wait_until
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.guidance import Guidance
from unmask.sampling import SAMPLERS
from unmask.sampling.factory import make_sampler
from unmask.serve._engine import DeadlineError, Engine, EngineClosedError, InternalError, QueueFullError
from unmask.serve._jobs import GeneratedSequence, generation_job, scoring_job
from unmask.serve._metrics import EngineMetrics


def test_in_company_a_row_is_what_it_is_alone() -> None:
    """Rows of all samplers and of many lengths, which join while others run."""
    lm = language_model()
    plans = [
        (canvas_ids(lm, 3 + 5 * (n % 6), n), make_sampler(lm.denoiser, name, steps=5 + n), 100 + n)
        for n, name in enumerate(["default", *SAMPLERS, *SAMPLERS])
    ]
    alone = [lm.generate(torch.tensor([ids]), sampler, seed).tokens[0].tolist() for ids, sampler, seed in plans]
    with running_engine(lm) as running:
        works = [generation_job(lm, ids, sampler, seed) for ids, sampler, seed in plans]
        first, second = PendingTasks(works[::2]), PendingTasks(works[1::2])
        running.submit(first.tasks)
        wait_until(lambda: any(first.events.values()))
        running.submit(second.tasks)
        rows: list[GeneratedSequence] = [None] * len(works)  # type: ignore[list-item]
        rows[::2], rows[1::2] = first.wait(), second.wait()
        batches = running.metrics.render().decode()
    assert [list(row.ids) for row in rows] == alone
    alone_in_a_call, calls = (
        float(next(line for line in batches.splitlines() if line.startswith(name)).split()[-1])
        for name in ('unmask_batch_size_bucket{le="1.0"}', "unmask_batch_size_count")
    )
    assert alone_in_a_call < calls / 2  # or nobody was in company
    for row, (ids, _, _) in zip(rows, plans, strict=True):
        for place, id_ in enumerate(ids):
            given = id_ != lm.vocab.mask_id
            assert (row.steps[place] == 0) == given
            assert (row.events[place] is None) == given


def test_scores_are_those_of_the_library_and_wait_for_nobody() -> None:
    lm = language_model()
    text = "abc abc def"
    ids = lm.tokenizer.encode(text)  # type: ignore[union-attr]
    with running_engine(lm) as running:
        waiting = PendingTasks(
            [
                scoring_job(lm, ids, 64, 3),
                generation_job(lm, canvas_ids(lm, 9, 1), make_sampler(lm.denoiser, "default"), 0),
            ]
        )
        running.submit(waiting.tasks)
        score, _ = waiting.wait()
    expected = lm.score(text, draws=64, seed=3)
    assert score.nats == pytest.approx(expected.nats)
    assert sum(score.token_nats) == pytest.approx(score.nats)
    assert len(score.token_nats) == len(ids)


def test_each_token_has_the_probability_that_it_was_drawn_with() -> None:
    """Where all but one position is given, the network can be asked again; alone and in company."""
    lm = language_model()
    texts = [[*lm.tokenizer.encode(text), lm.vocab.mask_id] for text in ("abc", "fed", "a cab", "hedge")]  # type: ignore[union-attr]
    kinds = ["default", "confidence", "default", "confidence"]
    # Guidance asks about a text whose condition is hidden as well; what is told is of the one with it.
    guides = [None, None, Guidance(cfg_scale=1.5), None]
    works = [
        generation_job(lm, ids, make_sampler(lm.denoiser, name, 4), 5, alternatives=3, guidance=guide)
        for ids, name, guide in zip(texts, kinds, guides, strict=True)
    ]
    for together in (works[:1], works):
        with running_engine(lm) as running:
            waiting = PendingTasks(together)
            running.submit(waiting.tasks)
            rows = waiting.wait()
        for ids, row in zip(texts, rows, strict=False):
            z = torch.tensor([ids])
            log_x = lm.denoiser(z, torch.ones(1, 1, dtype=torch.float64), z == lm.vocab.mask_id)[0].detach()
            event = row.events[-1]
            assert event.logprob == pytest.approx(float(log_x[row.ids[-1]]), rel=1e-5)
            best = log_x.topk(3)
            assert [id_ for id_, _ in event.alternatives] == best.indices.tolist()
            assert [p for _, p in event.alternatives] == pytest.approx(best.values.exp().tolist(), rel=1e-5)


def test_a_full_queue_takes_nothing_of_a_request() -> None:
    lm = language_model()
    gate = GatedNetwork(lm)
    work = generation_job(lm, canvas_ids(lm, 4, 0), make_sampler(lm.denoiser, "default", 2), 0)
    with running_engine(lm, max_batch=1, max_queue=3) as running:
        busy = PendingTasks([work] * 3)
        running.submit(busy.tasks[:1])
        wait_until(lambda: gate.num_calls == 1)
        running.submit(busy.tasks[1:])
        with pytest.raises(QueueFullError) as told:
            running.submit(PendingTasks([work] * 2).tasks)
        assert told.value.retry_after >= 1
        running.submit(extra := PendingTasks([work]).tasks)
        gate.open.set()
        busy.wait()
        running.cancel(extra)


def test_who_is_gone_or_late_leaves_before_the_next_call() -> None:
    lm = language_model()
    gate = GatedNetwork(lm)
    work = generation_job(lm, canvas_ids(lm, 8, 0), make_sampler(lm.denoiser, "first-hitting"), 0)
    with running_engine(lm) as running:
        gone, late, stays = PendingTasks([work]), PendingTasks([work], seconds=0.2), PendingTasks([work])
        queued = PendingTasks([work], seconds=0.0)
        for each in (gone, late, stays, queued):
            running.submit(each.tasks)
        wait_until(lambda: gate.num_calls == 1)
        running.cancel(gone.tasks)
        time.sleep(0.25)
        gate.open.set()
        assert isinstance(late.wait()[0], DeadlineError)
        assert isinstance(queued.wait()[0], DeadlineError)
        assert isinstance(stays.wait()[0], GeneratedSequence)
        assert gone.results == {}
        assert len(gone.events[0]) <= 1
        wait_until(lambda: b"unmask_running_sequences 0.0" in running.metrics.render())


def test_what_goes_wrong_concerns_only_whom_it_concerns() -> None:
    lm = language_model()

    def broken(denoiser: DenoiserLike, _tell: Any) -> None:
        raise ValueError("this one is wrong")

    class Unhappy(DenoiserWrapper):
        def __call__(self, z: Tensor, t: Tensor, positions: Any, *rest: Any, **options: Any) -> Tensor:
            return self.denoiser(z, t, positions, row_fn=lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]

    fine = generation_job(lm, canvas_ids(lm, 4, 0), make_sampler(lm.denoiser, "default", 4), 0)
    late = generation_job(
        lm,
        canvas_ids(lm, 4, 0),
        make_sampler(lm.denoiser, "default", 4),
        0,
        guidance=lambda denoise, *_: Unhappy(denoise),
    )
    with running_engine(lm) as running:
        mixed = PendingTasks([fine, broken, late, fine])
        running.submit(mixed.tasks)
        good, bad, also_bad, also_good = mixed.wait()
        assert (str(bad), good.ids) == ("this one is wrong", also_good.ids)
        assert isinstance(also_bad, InternalError)
        with torch.no_grad():
            lm.denoiser.backbone.lm_head.bias[0] = float("nan")
        damaged = PendingTasks([fine])
        running.submit(damaged.tasks)
        assert "damaged" in str(damaged.wait()[0])
        with torch.no_grad():
            lm.denoiser.backbone.lm_head.bias[0] = 0.0
        again = PendingTasks([fine])
        running.submit(again.tasks)
        assert isinstance(again.wait()[0], GeneratedSequence)


def test_where_memory_runs_out_the_calls_get_smaller() -> None:
    lm = language_model()
    inner = lm.denoiser.forward

    def forward(z: Tensor, *rest: Any, **options: Any) -> Tensor:
        if len(z) > 2:
            raise torch.OutOfMemoryError("can't allocate memory")
        return inner(z, *rest, **options)

    work = generation_job(lm, canvas_ids(lm, 6, 0), make_sampler(lm.denoiser, "first-hitting"), 0)
    expected = (
        lm.generate(torch.tensor([canvas_ids(lm, 6, 0)]), make_sampler(lm.denoiser, "first-hitting"), 0)
        .tokens[0]
        .tolist()
    )
    lm.denoiser.forward = forward  # type: ignore[method-assign]
    with running_engine(lm) as running:
        waiting = PendingTasks([work] * 7)
        running.submit(waiting.tasks)
        assert all(list(row.ids) == expected for row in waiting.wait())
        assert running.max_batch <= 2


def test_nobody_starves() -> None:
    """A row of its own length gets its turn among many others, as often as they do."""
    lm = language_model()
    crowd = [generation_job(lm, canvas_ids(lm, 3, 0), make_sampler(lm.denoiser, "first-hitting"), n) for n in range(12)]
    lonely = generation_job(lm, canvas_ids(lm, 36, 8), make_sampler(lm.denoiser, "first-hitting"), 0)
    with running_engine(lm, max_batch=4) as running:
        waiting = PendingTasks([*crowd[:6], lonely, *crowd[6:]])
        running.submit(waiting.tasks)
        waiting.wait()
        order = list(waiting.results)
    assert len(waiting.events[6]) == 36
    assert order.index(0) < order.index(6)


def test_closing_finishes_what_there_is_or_says_that_it_will_not() -> None:
    lm = language_model()
    work = generation_job(lm, canvas_ids(lm, 6, 0), make_sampler(lm.denoiser, "first-hitting"), 0)
    running = Engine(lambda: lm, EngineMetrics())
    patient = PendingTasks([work] * 3)
    running.submit(patient.tasks)
    running.close(shutdown_timeout=20)
    assert all(isinstance(row, GeneratedSequence) for row in patient.wait())
    with pytest.raises(EngineClosedError):
        running.submit(patient.tasks)

    gated = language_model()
    gate = GatedNetwork(gated)
    hasty = Engine(lambda: gated, EngineMetrics())
    waiting = PendingTasks(
        [generation_job(gated, canvas_ids(gated, 6, 0), make_sampler(gated.denoiser, "first-hitting"), 0)] * 2
    )
    hasty.submit(waiting.tasks)
    wait_until(lambda: gate.num_calls == 1)
    closing = threading.Thread(target=hasty.close)
    closing.start()
    time.sleep(0.1)
    gate.open.set()
    closing.join()
    assert all(isinstance(result, EngineClosedError) for result in waiting.wait())
