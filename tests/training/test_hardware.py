"""Peak, FLOPs, compilation and memory: measured figures against sums done by hand, and real failures."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import training_worker as worker
from unmask import MDLM, DiTConfig, ModelConfig, Vocab
from unmask.context import Context
from unmask.distributed import Distributed
from unmask.hardware.flops import count_flops, measure_peak_flops
from unmask.hardware.memory import is_out_of_memory, oom_advice
from unmask.training._compile import compile_blocks
from unmask.training._throughput import ThroughputMeter
from unmask.training.optim import AdamW, Muon

WORKER = Path(worker.__file__)
WIDTH, DEPTH, LENGTH, VOCABULARY, ROWS = 64, 3, 48, 130, 4


def attention_flops(rows: int, length: int, width: int) -> int:
    """Two products forwards and five backwards, each of 2 * rows * length^2 * width FLOPs."""
    return 7 * 2 * rows * length**2 * width


@pytest.mark.parametrize("masked", [False, True])
def test_counted_flops_are_those_of_the_formula(masked: bool) -> None:
    """A parameter of a matrix costs 6 FLOPs a position: 2 forwards, 4 backwards. The head, and all of the
    last layer but its keys, values and attention, cost 6 an asked row."""
    backbone = DiTConfig(width=WIDTH, depth=DEPTH, heads=2, max_length=LENGTH, dropout=0.0)
    model = ModelConfig(Vocab(VOCABULARY, VOCABULARY - 1), backbone, MDLM()).build()
    z = torch.full((ROWS, LENGTH), VOCABULARY - 1)
    rows = torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    context = Context(valid=torch.ones_like(rows) if masked else None)
    with count_flops(True) as count:
        log_x = model(z, torch.full((ROWS, 1), 0.5), rows, context)
        log_x[:, 0].sum().backward()
    blocks = DEPTH * (12 * WIDTH**2 * 6 * ROWS * LENGTH + attention_flops(ROWS, LENGTH, WIDTH))
    asked = int(rows.sum())
    head = WIDTH * VOCABULARY * 6 * asked
    spared = 10 * WIDTH**2 * 6 * (ROWS * LENGTH - asked)
    most = int(rows.sum(1).max())  # queries stand in as many places as any sequence has
    spared += attention_flops(ROWS, LENGTH, WIDTH) * (LENGTH - most) // LENGTH
    assert math.isclose(count.flops, blocks + head - spared, rel_tol=0.01)


def test_nothing_is_counted_unless_wanted() -> None:
    with count_flops(False) as count:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert count.flops == 0


def steps(run: Any, number: int) -> list[float]:
    return [run.step()["loss"] for _ in range(number)]


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-3), Muon()], ids=lambda o: type(o).__name__)
def test_counting_changes_no_number_and_adds_up(optimizer: AdamW | Muon, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(worker.TRAINING, optimizer=optimizer)
    run = worker.build_trainer(settings, 0.2, Distributed())
    curve = steps(run, 5)
    state = run.state
    assert state.flops_per_token > 0
    assert (state.flops_per_update > 0) == isinstance(optimizer, Muon)
    # Five steps, each with its own share of masked rows; what was not counted is like what was.
    mean = state.flops_per_token * state.tokens / 5 + state.flops_per_update
    assert math.isclose(state.flops, 5 * mean, rel_tol=0.05)
    from contextlib import nullcontext

    from unmask.hardware import flops as machine
    from unmask.training import trainer as loop

    monkeypatch.setattr(loop, "count_flops", lambda wanted: nullcontext(machine.FlopCount()))
    uncounted = worker.build_trainer(settings, 0.2, Distributed())
    assert steps(uncounted, 5) == curve
    assert uncounted.state.flops == 0


def test_the_steps_that_are_counted_are_1_2_4_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run's number: a resumed run counts the same steps as an uninterrupted one."""
    from unmask.training import trainer as loop

    counted: list[int] = []
    real, run = count_flops, worker.build_trainer(worker.TRAINING, 0.0, Distributed())

    def noted(wanted: bool) -> Any:
        if wanted and run.state.step + 1 not in counted:
            counted.append(run.state.step + 1)
        return real(wanted)

    monkeypatch.setattr(loop, "count_flops", noted)
    steps(run, 9)
    assert counted == [1, 2, 4, 8]


def test_the_peak_is_that_of_a_large_product_and_soon_found() -> None:
    import time

    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    started = time.process_time()
    peak = measure_peak_flops(torch.float32, torch.device("cpu"), seconds=0.2)
    assert time.process_time() - started < 1.0 * torch.get_num_threads()
    assert torch.rand(()) == expected  # the run's random numbers are left alone
    a = torch.rand(512, 512)
    started = time.perf_counter()
    a @ a
    here = 2 * 512**3 / (time.perf_counter() - started)
    assert here / 10 < peak < here * 100  # others may be computing, too


def test_pace_is_work_over_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.training._throughput.peak_flops", lambda *_: 1000.0)
    pace = ThroughputMeter(Distributed(), False, tokens=100, flops=1e6)
    pace.seconds = 2.0
    assert pace.metrics(130, 1e6 + 500) == {"tokens_per_second": 15.0, "mfu": 0.25}
    with pace.time_step():
        pass
    assert 0 < pace.seconds < 1
    pace.seconds = 1.0
    assert pace.metrics(140, 1e6 + 600) == {"tokens_per_second": 10.0, "mfu": 0.1}


def test_compilation_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="compile needs a C\\+\\+ compiler, and there is no no-such-compiler"):
        worker.build_trainer(replace(worker.TRAINING, compile=True), 0.0, Distributed())
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(ValueError, match="made of blocks"):
        compile_blocks(torch.nn.Linear(2, 2))


def process(folder: Path, ranks: int = 1, **wishes: Any) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launch, str(WORKER), str(folder), json.dumps(wishes)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_runs_are_eager_runs_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Alone, resumed, and on two ranks; the lengths of rows vary."""
    wishes = {"random_length_prob": 0.5, "steps": 10}
    assert process(tmp_path / "eager", **wishes).returncode == 0
    compiled = process(tmp_path / "compiled", compile=True, report_frames=True, **wishes)
    assert compiled.returncode == 0, compiled.stderr
    assert "compiled frames: 0" not in compiled.stdout
    assert "compiled frames:" in compiled.stdout
    for a, b in zip(losses(tmp_path / "eager"), losses(tmp_path / "compiled"), strict=True):
        assert math.isclose(a, b, rel_tol=1e-4)
    assert losses(tmp_path / "eager") != losses(tmp_path / "compiled")  # other code has run
    assert process(tmp_path / "resumed", compile=True, kill_at=6, **wishes).returncode == -9
    assert process(tmp_path / "resumed", compile=True, **wishes).returncode == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "compiled")
    assert process(tmp_path / "ranks", 2, compile=True, **wishes).returncode == 0
    for a, b in zip(losses(tmp_path / "eager"), losses(tmp_path / "ranks"), strict=True):
        assert math.isclose(a, b, rel_tol=1e-4)


def test_what_counts_as_out_of_memory() -> None:
    allocator = "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"
    for error in (RuntimeError(allocator), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError(allocator))
    assert "microbatch_size=4," in oom_advice(8)
    assert "smaller network" in oom_advice(1)


FREED = """
import resource, sys
from unmask.hardware.memory import retain_freed_memory
if "keep" in sys.argv:
    retain_freed_memory()
for turn in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (turn + (1 << 26))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="only glibc can be told")
@pytest.mark.parametrize(
    ("told", "environment", "kept"),
    [((), {}, False), (("keep",), {}, True), (("keep",), {"MALLOC_TOP_PAD_": "131072"}, False)],
    ids=["default", "kept", "environment"],
)
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(
    told: tuple[str, ...], environment: dict[str, str], kept: bool
) -> None:
    """64 MB again and again: as fresh pages each time, or as the same."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FREED, *told],
        capture_output=True,
        text=True,
        check=True,
        env=ours | environment,
    )
    assert (int(done.stdout) < 1000) is kept  # of 16,384 pages of 4 kB
