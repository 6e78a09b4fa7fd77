"""Real processes, killed with real signals: nothing is lost, and resumed runs are bit-identical."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from processes import run_program

WORKER = Path(__file__).parents[1] / "training_worker.py"


def process(folder: Path, ranks: int = 1, **wishes: Any) -> subprocess.CompletedProcess[str]:
    return run_program(WORKER, folder, json.dumps(wishes), ranks=ranks)


def run(folder: Path, ranks: int = 1, **wishes: Any) -> int:
    done = process(folder, ranks, **wishes)
    print(done.stderr)  # which a failing test then shows
    return done.returncode


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run, with dropout."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, dropout=0.2) == 0
    assert [step for step, _ in losses(folder)] == list(range(1, 13))
    return folder


@pytest.mark.parametrize("kill_at", [3, 6, 11])
def test_kill_9_loses_only_the_steps_since_the_last_save(whole: Path, tmp_path: Path, kill_at: int) -> None:
    assert run(tmp_path, dropout=0.2, kill_at=kill_at) == -9
    assert run(tmp_path, dropout=0.2) == 0
    assert losses(tmp_path) == losses(whole)


def test_kill_9_inside_a_save(whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path, dropout=0.2, kill_in_save=True) == -9
    assert not (tmp_path / "step-00000008").exists()
    assert run(tmp_path, dropout=0.2) == 0
    assert losses(tmp_path) == losses(whole)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_polite_signal_finishes_the_step_saves_and_says_so(whole: Path, tmp_path: Path, signal: str) -> None:
    assert run(tmp_path, dropout=0.2, kill_at=5, signal=signal) == 3
    assert (tmp_path / "step-00000006").exists()
    assert run(tmp_path, dropout=0.2) == 0
    assert losses(tmp_path) == losses(whole)


def test_memory_that_runs_out_leaves_the_checkpoint_whole(whole: Path, tmp_path: Path) -> None:
    """The process really runs into its limit, in step 6; the next one goes on, bit for bit."""
    starved = process(tmp_path, dropout=0.2, memory_ends_at=5)
    assert starved.returncode == 1
    last = starved.stderr.strip().splitlines()[-1]
    assert "OutOfMemoryError: memory ran out after step 5: 2 rows at once were too many" in last
    assert "try microbatch_size=1, which means the same" in last
    assert last.endswith(f"the checkpoint {tmp_path / 'step-00000004'} is intact")
    assert run(tmp_path, dropout=0.2) == 0
    assert losses(tmp_path) == losses(whole)


def test_a_damaged_checkpoint_is_skipped(whole: Path, tmp_path: Path) -> None:
    assert run(tmp_path, dropout=0.2, kill_at=10) == -9
    damaged = next((tmp_path / "step-00000008").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert run(tmp_path, dropout=0.2) == 0
    assert losses(tmp_path) == losses(whole)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The losses of one process, without dropout, whose noise depends on the rank."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder) == 0
    return losses(folder)


def close(folder: Path, expected: list[tuple[int, float]]) -> bool:
    return all(abs(a - b) < 1e-5 for (_, a), (_, b) in zip(losses(folder), expected, strict=True))


@pytest.mark.parametrize(
    ("ranks", "wishes"),
    [(2, {}), (3, {}), (2, {"sharded": True}), (2, {"sharded": True, "gradient_checkpointing": True})],
)
def test_ranks_give_the_same_curve(
    alone: list[tuple[int, float]], tmp_path: Path, ranks: int, wishes: dict[str, bool]
) -> None:
    assert run(tmp_path, ranks, **wishes) == 0
    assert close(tmp_path, alone)


@pytest.mark.slow
def test_blocks_with_clipped_times_give_the_same_curve_on_ranks_and_after_a_kill(tmp_path: Path) -> None:
    assert run(tmp_path / "alone", 1, blocks=True) == 0
    expected = losses(tmp_path / "alone")
    assert run(tmp_path / "ranks", 2, blocks=True) == 0
    assert close(tmp_path / "ranks", expected)
    assert run(tmp_path / "killed", 1, blocks=True, kill_at=9) != 0
    assert run(tmp_path / "killed", 1, blocks=True) == 0
    assert losses(tmp_path / "killed") == expected


@pytest.mark.slow
def test_learned_schedules_give_the_same_curve_on_ranks_sharded_and_after_a_kill(tmp_path: Path) -> None:
    """Their gradients too, which come from outside of the network's call: Adam would hide a wrong factor."""

    def grad_norms(folder: Path) -> list[float]:
        return [json.loads(line)["grad_norm"] for line in (folder / "metrics.jsonl").read_text().splitlines()]

    assert run(tmp_path / "alone", 1, genmd4=True, steps=6) == 0
    expected = losses(tmp_path / "alone")
    for name, wishes in (("ranks", {}), ("shards", {"sharded": True})):
        assert run(tmp_path / name, 2, genmd4=True, steps=6, **wishes) == 0
        assert close(tmp_path / name, expected)
        assert grad_norms(tmp_path / name) == pytest.approx(grad_norms(tmp_path / "alone"), rel=1e-4)
    assert run(tmp_path / "killed", 1, genmd4=True, steps=6, kill_at=5) != 0
    assert run(tmp_path / "killed", 1, genmd4=True, steps=6) == 0
    assert losses(tmp_path / "killed") == expected


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_on_any_number(
    alone: list[tuple[int, float]], tmp_path: Path, ranks: int
) -> None:
    assert run(tmp_path, 2, steps=8) == 0
    assert run(tmp_path, ranks) == 0
    assert close(tmp_path, alone)
