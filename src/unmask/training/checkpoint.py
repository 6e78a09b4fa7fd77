"""Checkpoints that survive anything: a fresh folder, fsynced, checksummed, then renamed.

`step-00001200/` holds distributed-checkpoint files of the run's tensors (each rank writes its part, any
number of ranks can read them), `state.json` for numbers, and, written last, `manifest.json` with the
SHA-256 of every file. A folder without a true manifest does not count. The tensors' metadata is a
pickle of torch's: it is the run's private state, never something to share (export makes that).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from unmask.world import World

MANIFEST, STATE = "manifest.json", "state.json"
NAME = re.compile(r"step-(\d{8})")


def save(folder: Path, step: int, tensors: dict[str, Any], state: dict[str, Any], world: World) -> Path:
    """Write the checkpoint of `step`; until it is whole, nothing of it is seen under its name."""
    final = folder / f"step-{step:08d}"
    if not world.any(problem(final) is not None):
        return final
    fresh = folder / f".{final.name}.writing"
    if world.first:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    world.barrier()
    try:
        with _alone(world) as alone:
            dcp_save(tensors, checkpoint_id=fresh, no_dist=alone)
    except CheckpointException as error:  # derives from BaseException, so nobody else would catch it
        raise OSError(f"the checkpoint of step {step} could not be written: {_cause(error)}") from None
    world.barrier()
    if world.first:
        (fresh / STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        sums = {file.name: _sha256(file) for file in sorted(fresh.iterdir())}
        (fresh / MANIFEST).write_text(json.dumps(sums, indent=2), encoding="utf-8")
        for entry in [*fresh.iterdir(), fresh]:
            _fsync(entry)
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        _fsync(folder)
    world.barrier()
    return final


def rotate(folder: Path, keep: int) -> None:
    """Delete the oldest, but only once the newest is verified, and never fewer than two are left."""
    steps = sorted(_steps(folder))
    excess = steps[: -max(2, keep)]
    if excess and problem(folder / f"step-{steps[-1]:08d}") is None:
        for step in excess:
            shutil.rmtree(folder / f"step-{step:08d}")


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and what is wrong with the newer ones that had to be skipped."""
    skipped: list[str] = []
    for step in sorted(_steps(folder), reverse=True):
        path = folder / f"step-{step:08d}"
        wrong = problem(path)
        if wrong is None:
            return path, skipped
        skipped.append(wrong)
    return None, skipped


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in sums.items():
            if _sha256(path / name) != expected:
                return f"{path / name} is damaged: its SHA-256 is not the one in {MANIFEST}"
    except (OSError, ValueError, AttributeError) as error:
        return f"{path} is incomplete: {error}"
    return None


def load(path: Path, tensors: dict[str, Any], world: World) -> dict[str, Any]:
    """Read a checkpoint into the given tensors, in place; returns the numbers."""
    with _alone(world) as alone:
        dcp_load(tensors, checkpoint_id=path, no_dist=alone)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


@contextmanager
def _alone(world: World) -> Iterator[bool]:
    """Whether there is one process only; torch's warning that there is no other is then no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield world.size == 1


def _cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0] if error.failures else error


def _steps(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        for entry in folder.iterdir():
            if match := NAME.fullmatch(entry.name):
                yield int(match[1])


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fsync(entry: Path) -> None:
    handle = os.open(entry, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
