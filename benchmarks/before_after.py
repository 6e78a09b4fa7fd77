"""Is this version as fast as an earlier one? Training, sampling, scoring and memory of two commits, side by side.

    python -m benchmarks.before_after COMMIT [--repeats 7] [--only training]

COMMIT is checked out into a temporary worktree. Each version runs in a process of its own, and they take turns, so
that the noise of the machine is shared. A ratio below 1 means that this version needs less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]

WorkFn = Callable[[], object]


def _attribute(*names: str) -> Any:
    """The first `module:attribute` that this version has: names of earlier versions come last."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"this version has none of {', '.join(names)}")


def _training(size: str, batch: int) -> WorkFn:
    make = _attribute("benchmarks.training:unmask_trainer", "benchmarks.training:own_run")
    trainer = make(_attribute(f"benchmarks.training:{size}"), batch)
    trainer.state.step = 100  # the first steps count FLOPs, which takes time
    step: WorkFn = trainer.step if hasattr(trainer, "step") else trainer.train_step
    return lambda: (step(), step())


def _model(size: str) -> Any:
    make = _attribute("benchmarks.side_by_side:matched_pair", "benchmarks.measure:pair")
    return make(_attribute(f"benchmarks.training:{size}"))[1]


def _sampling(size: str, n: int, steps: int) -> WorkFn:
    model, sampler = _model(size), _attribute("unmask:Ancestral")(steps)
    return lambda: model.sample(n, sampler=sampler, seed=0)


def _scoring(size: str, draws: int) -> WorkFn:
    model, length = _model(size), _attribute(f"benchmarks.training:{size}").length
    return lambda: model.score([[7 * i % 27 for i in range(length)]], draws=draws)


CASES: dict[str, Callable[[], WorkFn]] = {
    "training words": lambda: _training("WORDS", 8),
    "training characters": lambda: _training("CHARACTERS", 16),
    "sampling words": lambda: _sampling("WORDS", 4, 32),
    "sampling characters": lambda: _sampling("CHARACTERS", 4, 64),
    "scoring words": lambda: _scoring("WORDS", 64),
    "scoring characters": lambda: _scoring("CHARACTERS", 64),
}


class _Worker:
    """A process that runs one case with the code of one version, whenever it is called."""

    def __init__(self, tree: Path, case: str) -> None:
        paths = os.pathsep.join((str(tree / "src"), str(tree)))
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", case],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> dict[str, float]:
        """Seconds of one run, and the process's peak memory in MB so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a version could not run this case; see its error above")
        measured: dict[str, float] = json.loads(line)
        return measured

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def _serve(case: str) -> None:
    """Run the case once for each line of the input."""
    work = CASES[case]()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not stand between the answers
    for _ in sys.stdin:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (10 if sys.platform != "darwin" else 20))
        print(json.dumps({"seconds": seconds, "MB": peak}), file=answers, flush=True)


@dataclass(frozen=True)
class Comparison:
    """Measurements of one case, pair by pair."""

    case: str
    unit: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """after / before of pairs that were measured one after the other."""
        return [after / before for before, after in zip(self.before, self.after, strict=True)]

    def __str__(self) -> str:
        before, after = statistics.median(self.before), statistics.median(self.after)
        ratios = f"{statistics.median(self.ratios):.3f} ({min(self.ratios):.3f} to {max(self.ratios):.3f})"
        return f"{self.case:22} {before:10.3f} {after:10.3f} {self.unit:8} {ratios}"


def measure(case: str, before: Path, after: Path, repeats: int) -> Iterator[Comparison]:
    """Time and peak memory of a case in two source trees, after one run of each that does not count."""
    with ExitStack() as processes:
        workers = [processes.enter_context(_Worker(tree, case)) for tree in (before, after)]
        for worker in workers:
            worker()
        pairs = []
        for repeat in range(repeats):
            order = workers if repeat % 2 == 0 else workers[::-1]
            results = {id(worker): worker() for worker in order}
            pairs.append([results[id(worker)] for worker in workers])
    yield Comparison(case, "s", tuple(b["seconds"] for b, _ in pairs), tuple(a["seconds"] for _, a in pairs))
    last_before, last_after = pairs[-1]
    yield Comparison("  peak memory", "MB", (last_before["MB"],), (last_after["MB"],))


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A commit in a temporary worktree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare this source tree with a commit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__.split("\n")[0])
    parser.add_argument("commit", nargs="?", help="the earlier version")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of measurements")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names: " + ", ".join(CASES))
    parser.add_argument("--worker", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _serve(options.worker)
        return
    if options.commit is None:
        parser.error("which commit is the earlier version?")
    with checked_out(options.commit) as tree:
        print(f"{'':22} {'before':>10} {'after':>10} {'':8} after / before (spread)")
        for case in CASES:
            if any(word in case for word in options.only):
                for comparison in measure(case, tree, ROOT, options.repeats):
                    print(comparison, flush=True)


if __name__ == "__main__":
    main()
