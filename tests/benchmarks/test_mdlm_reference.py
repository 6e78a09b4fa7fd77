"""The yardstick computes what `unmask` does: only speed differs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scoring
from benchmarks.side_by_side import (
    IsolatedProcess,
    RandomTokens,
    Result,
    compare,
    fastest_pair,
    matched_pair,
    time_alternating,
)
from benchmarks.textbook import (
    ModelSize,
    ReferenceMDLM,
    ReferenceTrainer,
    ancestral_sample,
    nll_estimates,
    sample_categorical,
    semi_autoregressive_sample,
)
from benchmarks.training import baseline_trainer, random_batch, unmask_steps, unmask_trainer
from unmask import DiTConfig
from unmask.data.corpus import PrepareConfig
from unmask.data.loader import Wrapped
from unmask.experiment import Experiment
from unmask.objectives.base import corrupt_batch
from unmask.training.config import TrainingConfig
from unmask.types import Batch

SIZE = ModelSize(vocab=13, depth=2, width=32, length=12, heads=2)


def text(rows: int) -> torch.Tensor:
    ids = RandomTokens.generate(rows * SIZE.length, SIZE.vocab).ids
    return torch.from_numpy(ids).view(rows, SIZE.length)


def test_log_x_is_the_same() -> None:
    textbook, model = matched_pair(SIZE)
    z = text(3).masked_fill(torch.arange(SIZE.length) % 3 == 0, textbook.mask_id)
    rows = z == textbook.mask_id
    with torch.no_grad():
        torch.testing.assert_close(textbook(z)[rows][:, :-1], model.denoiser(z, torch.full((3, 1), 0.5), rows)[:, :-1])


def test_losses_and_gradients_are_the_same() -> None:
    """For the same times and the same noise."""
    textbook, model = matched_pair(SIZE)
    denoise, objective = model.denoiser.train(), model.objective
    x, t = text(4), torch.tensor([0.2, 0.4, 0.7, 0.95])
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = objective.noise_level(t[:, None].double())
    batch = Batch(x)
    z = corrupt_batch(objective.process, batch, moment.alpha, noise, denoise.vocab)
    ours = objective.weighted_nll(denoise, batch, z, moment).mean()
    theirs = textbook.loss(x, t, noise)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.backward()
    theirs.backward()
    head = denoise.backbone.lm_head.weight.grad
    assert head is not None
    published: Any = textbook.output_layer.linear.weight.grad
    torch.testing.assert_close(head, published, rtol=1e-3, atol=1e-6)


def test_under_autocast_products_are_in_bfloat16_and_the_loss_is_about_the_same() -> None:
    """As the published code computes it."""
    plain, mixed = matched_pair(SIZE)[0], matched_pair(SIZE, bf16=True)[0]
    x, t = text(4), torch.tensor([0.2, 0.4, 0.7, 0.95])
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        assert plain(x).dtype == torch.float32
        assert mixed(x).dtype == torch.bfloat16
    loss = mixed.loss(x, t, noise)
    torch.testing.assert_close(loss, plain.loss(x, t, noise), rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in mixed.parameters())


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_the_textbook_takes_the_precision_in_which_it_is_faster(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000))
    monkeypatch.setattr("benchmarks.side_by_side.time.perf_counter", lambda: next(clock))

    def work(textbook: ReferenceMDLM) -> None:
        if textbook.bf16 != (faster == "bfloat16"):
            next(clock), next(clock)

    textbook, precision, _ = fastest_pair(SIZE, work)
    assert precision == faster
    assert textbook.bf16 == (faster == "bfloat16")


def test_sampling_fills_every_hole_and_keeps_the_rest() -> None:
    textbook, _ = matched_pair(SIZE)
    x = text(2)
    holes = torch.arange(SIZE.length) % 2 == 0
    filled = ancestral_sample(textbook, x.masked_fill(holes, textbook.mask_id), steps=5)
    assert bool((filled != textbook.mask_id).all())
    assert torch.equal(filled[:, ~holes], x[:, ~holes])
    assert bool((semi_autoregressive_sample(textbook, 1, 24, 6, steps=3) != textbook.mask_id).all())


@pytest.mark.parametrize("bf16", [False, True])
def test_many_steps_reveal_at_the_right_rate_in_both_precisions(bf16: bool) -> None:
    """Numbers drawn in bfloat16 would reveal hardly anything, and calls be saved for it."""
    textbook, _ = matched_pair(SIZE, bf16=bf16)
    begun = ancestral_sample(textbook, torch.full((64, SIZE.length), textbook.mask_id), steps=500, max_steps=50)
    assert abs(float((begun == textbook.mask_id).double().mean()) - 0.9) < 0.04


def test_some_of_the_steps_are_the_first_of_all_and_end_there() -> None:
    textbook, _ = matched_pair(SIZE)
    calls: list[int] = []
    textbook.register_forward_hook(lambda *_: calls.append(1))
    blank = torch.full((64, SIZE.length), textbook.mask_id)
    begun = ancestral_sample(textbook, blank, steps=8, max_steps=2)
    assert len(calls) == 2
    assert abs(float((begun == textbook.mask_id).double().mean()) - 6 / 8) < 0.07


def test_gumbel_choices_have_the_right_frequencies() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.1, 0.2, 0.7]).expand(20_000, 3)
    counts = torch.bincount(sample_categorical(weights), minlength=3) / 20_000
    torch.testing.assert_close(counts, weights[0], atol=0.015, rtol=0)


def test_it_learns() -> None:
    torch.manual_seed(0)
    trainer = ReferenceTrainer(ReferenceMDLM(SIZE), lr=1e-2)
    losses = [trainer.step(torch.ones(8, SIZE.length, dtype=torch.int64)) for _ in range(30)]
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


def test_its_score_is_ours() -> None:
    textbook, model = matched_pair(SIZE)
    x = text(8)
    torch.manual_seed(0)
    theirs = nll_estimates(textbook, x, draws=60, batch=8)
    ours = model.score([row.tolist() for row in x], draws=256)
    error = float(theirs.std()) / 60**0.5 + ours.standard_error
    assert abs(float(theirs.mean()) - ours.nats_per_token) < 4 * error


def test_both_are_stepped_on_the_same_text() -> None:
    trainer, run = baseline_trainer(SIZE), unmask_trainer(SIZE, batch=4)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert abs(trainer.step(random_batch(SIZE, 4)) - run.step()["loss"]) < 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@dataclass
class Clock:
    """Work that takes a known time."""

    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1


def test_both_works_are_measured_in_turns() -> None:
    theirs, ours = Clock(), Clock()
    times = time_alternating(theirs, ours, repeats=3)
    assert (theirs.calls, ours.calls, len(times[0]), len(times[1])) == (4, 4, 3, 3)


def test_work_in_a_process_of_its_own_is_done_and_counted() -> None:
    with IsolatedProcess(unmask_steps, SIZE, 2, False) as work:
        work()
        assert work.flops() > 2 * 12 * SIZE.width**2 * 2 * SIZE.length  # more than a forward pass of a layer
    assert not work.process.is_alive()


def test_a_result_is_the_middle_of_its_ratios() -> None:
    result = Result("work", "float32", (2.0, 9.0, 3.0), (1.0, 1.0, 1.0))
    assert result.ratio == 3.0
    assert result.to_json()["ratios"] == [2.0, 9.0, 3.0]


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_comparison_counts_the_products(repeats: int) -> None:
    a = torch.randn(32, 32)
    result = compare("product", "float32", lambda: a @ a @ a, lambda: a @ a, repeats)
    assert len(result.ratios) == repeats
    assert result.peak_fraction is not None
    assert 0 < result.peak_fraction < 2


def test_scoring_is_measured_to_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat, and the dog did not. " * 200)
    monkeypatch.setattr(scoring, "PASSES", 8)
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=12)
    learned = Experiment(
        (str(tmp_path / "a.txt"),),
        "bytes",
        backbone,
        layout=Wrapped(12),
        prepare=PrepareConfig(validation_fraction=0.5),
        training=TrainingConfig(steps=1, batch_size=2),
    )
    result = scoring.measure_scoring(scoring.Case("tiny", SIZE, learned, steps=2))
    assert len(result.ratios) == 3
    assert min(result.ratios) > 0
    assert "variances are" in result.note
