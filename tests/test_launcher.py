"""torchrun's own process: signals and failures of `unmask` end with its exit codes, without tracebacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unmask.launcher import _exit_code

ROOT = Path(__file__).parents[1]
TINY = (
    *("train", "stdlib-tiny", "--tokenizer", "bytes", "--steps", "100000", "--batch-size", "4"),
    *("--set", "backbone.width=32", "backbone.depth=1", "backbone.heads=2", "training.log_every=1"),
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which the project is installed as its pyproject.toml says today, whenever that was done."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "installed" / "unmask-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: unmask\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(metadata.parent), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def torchrun(environment: dict[str, str], *command: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks in a session of their own, ended with the test."""
    environment.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def training(environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that has made its first step."""
    (folder / "text.txt").write_text("the cat sat on the mat and the dog ran\n" * 200)
    metrics = folder / "run" / "metrics.jsonl"
    given = ("--sources", str(folder / "text.txt"), "--out", str(folder / "run"))
    with torchrun(environment, "-m", "unmask", *TINY, *given) as process:
        end = time.monotonic() + 240
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.1)
        yield process


def children(process: subprocess.Popen[str]) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task")
    return [int(pid) for task in tasks.glob("*/children") for pid in task.read_text().split()]


@pytest.mark.parametrize(
    ("number", "receiver"),
    [
        (signal.SIGINT, "group"),  # Ctrl+C
        (signal.SIGTERM, "everybody"),  # what a cluster does; a rank is signalled twice
        pytest.param(signal.SIGTERM, "launcher", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "launcher", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "rank", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_ends_with_3_through_torchrun(
    number: signal.Signals, receiver: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with training(environment, tmp_path) as process:
        ranks = children(process)
        for pid in {
            "launcher": [process.pid],
            "group": [-process.pid],
            "everybody": [*ranks, process.pid],
            "rank": ranks[1:],
        }[receiver]:
            os.kill(pid, number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 3, said
    assert list((tmp_path / "run").glob("step-*"))
    assert "saved at step" in said
    for word in ("Traceback", "Warning", "Error", "signal", "OMP_NUM_THREADS", "terminate"):
        assert word not in said, said


def test_bad_input_ends_with_2_and_its_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    with torchrun(environment, "-m", "unmask", "train", "no-such-recipe") as process:
        _, said = process.communicate(timeout=240)
    assert process.returncode == 2, said
    assert {line.split(";")[0] for line in said.splitlines()} == {said.splitlines()[0].split(";")[0]}
    assert said.startswith("unmask: ")


@pytest.mark.slow
def test_torchrun_does_as_always_for_other_programs(environment: dict[str, str]) -> None:
    with torchrun(environment, "-m", "this.is.not.unmask") as process:
        _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "ChildFailedError" in said


@pytest.mark.parametrize(
    ("codes", "signalled", "expected"),
    [
        ([3, 3], signal.SIGTERM, 3),
        ([3, -15], None, 3),  # a rank that had saved and was on its way out
        ([0, 0], signal.SIGTERM, 0),  # it came when all was done
        ([-15, -15], signal.SIGTERM, 143),  # before training had begun
        ([130, 1], signal.SIGINT, 130),
        ([-9, -9], signal.SIGTERM, 143),
        ([2, -15], None, 2),
        ([-9, 1], None, 137),
        ([1, -15], None, 1),
    ],
)
def test_the_code_of_the_launcher(codes: list[int], signalled: int | None, expected: int) -> None:
    assert _exit_code(codes, signalled) == expected
