"""Both implementations are measured in turns, on the same work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import scoring
from benchmarks.baseline import nll_estimates
from benchmarks.side_by_side import (
    IsolatedProcess,
    RandomTokens,
    Result,
    compare,
    fastest_pair,
    matched_pair,
    time_alternating,
)
from benchmarks.training import baseline_trainer, random_batch, unmask_steps, unmask_trainer
from examples.mdlm_reference import (
    ModelSize,
    ReferenceMDLM,
)
from unmask import DiTConfig
from unmask.data.corpus import PrepareConfig
from unmask.data.loader import Wrapped
from unmask.experiment import Experiment
from unmask.training.config import TrainingConfig

SIZE = ModelSize(vocab=13, depth=2, width=32, length=12, heads=2)


def text(rows: int) -> torch.Tensor:
    ids = RandomTokens.generate(rows * SIZE.length, SIZE.vocab).ids
    return torch.from_numpy(ids).view(rows, SIZE.length)


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_the_reference_takes_the_precision_in_which_it_is_faster(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000_000))
    monkeypatch.setattr("benchmarks.side_by_side.time.perf_counter", lambda: next(clock))

    def work(reference: ReferenceMDLM) -> None:
        if reference.bf16 != (faster == "bfloat16"):
            next(clock), next(clock)

    reference, precision, _ = fastest_pair(SIZE, work)
    assert precision == faster
    assert reference.bf16 == (faster == "bfloat16")


def test_its_score_is_ours() -> None:
    reference, model = matched_pair(SIZE)
    x = text(8)
    torch.manual_seed(0)
    theirs = nll_estimates(reference, x, draws=60, batch=8)
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
