"""Measuring and sampling mean the same on one process and on many: real ones."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import unmask
from evaluation_worker import evaluate_all
from processes import run_program
from unmask.distributed import Distributed, _wait_for_gloo_threads, exit_rank

WORKER = Path(__file__).with_name("evaluation_worker.py")
RUNS = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("ranks")
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc "))
    for parameter in lm.denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (folder / "text.txt").write_text("abc cab ba " * 150)  # 104 windows: four batches, the last one short
    return unmask.save(lm, folder / "model"), folder / "text.txt"


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_ranks_find_what_one_finds(ranks: int, given: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = given
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker: threads change the last bits
    alone = json.loads(json.dumps(evaluate_all(model, text, tmp_path / "alone", Distributed())))
    torch.set_num_threads(threads)
    done = run_program(WORKER, model, text, tmp_path / "found", ranks=ranks)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["tokens"] == alone["tokens"]
        assert found["num_queries"] == alone["num_queries"]
        assert found["eval"] == alone["eval"]
        assert found["precise"] == alone["precise"]
        assert found["score"] == alone["score"]
        assert found["requests"] == alone["requests"]


@contextmanager
def busy_processors(number: int) -> Iterator[None]:
    """Processes that do nothing, all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    ("kinds", "busy"),
    [
        (["race", "drop", "sharded", "replicated"], 0),
        pytest.param(["race", "sharded", "drop", "replicated", "lowrank"] * 40, 2, marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_no_rank_aborts_or_warns_when_it_leaves(kinds: list[str], busy: int, tmp_path: Path) -> None:
    """Group threads that outlive the group once aborted the interpreter while it was ending."""
    paths = os.pathsep.join([str(RUNS.parent), os.environ.get("PYTHONPATH", "")])
    with busy_processors(busy):
        done = subprocess.run(
            [sys.executable, str(RUNS), tmp_path, *kinds],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=60 * len(kinds),  # ranks that wait for each other wait for ever
        )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["kind"] for run in runs] == kinds
    assert [run for run in runs if run["codes"] != [0, 0] or run["stderr"] != ["", ""]] == []


@pytest.mark.skipif(not Path("/proc/thread-self").exists(), reason="threads are seen on Linux only")
def test_the_end_waits_for_threads_of_gloo_that_have_something_to_do() -> None:
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        Path("/proc/thread-self/comm").write_text("pt_gloo_test")
        begun.set()
        for _ in range(5):
            hashlib.sha256(bytes(50_000_000))  # without the interpreter's lock, as C++ works
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    _wait_for_gloo_threads()
    assert done.is_set()
    thread.join()


def test_a_rank_that_leaves_has_done_its_work_at_exit_and_written_what_it_said() -> None:
    program = (
        "import atexit; from unmask.distributed import exit_rank; atexit.register(print, 'at the end');"
        "print('said', end=' '); exit_rank(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "said at the end\n", "")


def test_who_is_alone_need_not_leave() -> None:
    exit_rank(3)
