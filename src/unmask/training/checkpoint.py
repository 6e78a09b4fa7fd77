"""Checkpoints that survive anything: a fresh folder, fsynced, checksummed, then renamed.

`step-00001200/` holds distributed-checkpoint files of the run's tensors (each rank writes its part, any
number of ranks can read them), `state.json` for numbers, and, written last, `manifest.json` with the
SHA-256 of every file. A folder without a true manifest does not count. The tensors' metadata is a
pickle of torch's: it is the run's private state, never something to share (export makes that).
"""

from __future__ import annotations

import hashlib
import itertools
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

from unmask.distributed import Distributed
from unmask.io.atomic import fsync

_MANIFEST_FILE, _STATE_FILE = "manifest.json", "state.json"
_DCP_METADATA_FILE, _DCP_SUFFIX, _WRITING_SUFFIX = ".metadata", ".distcp", ".writing"
_STEP_FOLDER = re.compile(r"step-(\d{8})")


def save(folder: Path, step: int, tensors: dict[str, Any], state: dict[str, Any], distributed: Distributed) -> Path:
    """Write the checkpoint of `step`: all of it or, if anything fails, nothing."""
    final = checkpoint_path(folder, step)
    if not distributed.any_rank(integrity_error(final) is not None):
        return final
    fresh = folder / f".{final.name}{_WRITING_SUFFIX}"
    if distributed.is_main:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    distributed.barrier()
    try:
        _write_tensors(fresh, final, tensors, distributed)
        if distributed.is_main:
            (fresh / _STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
            sums = {file.name: _sha256(file) for file in sorted(fresh.iterdir())}
            (fresh / _MANIFEST_FILE).write_text(json.dumps(sums, indent=2), encoding="utf-8")
            for entry in [*fresh.iterdir(), fresh]:
                fsync(entry)
            _remove(final)
            fresh.rename(final)
            fsync(folder)
    except BaseException:
        if distributed.is_main:
            shutil.rmtree(fresh, ignore_errors=True)  # it may be what fills the disk
        raise
    distributed.barrier()
    return final


def delete_old(folder: Path, keep: int, verified: set[Path]) -> None:
    """Delete the oldest: `keep` whole ones, and never fewer than two, are left.

    One that is damaged does not count: it stays until there are enough whole ones that are newer. Those that
    are `known` to be whole are not read again; what is found to be joins them.
    """
    whole = 0
    for step in sorted(_saved_steps(folder), reverse=True):
        path = checkpoint_path(folder, step)
        if whole >= max(2, keep):
            _remove(path)
        elif path in verified or integrity_error(path) is None:
            verified.add(path)
            whole += 1


def remove_leftovers(folder: Path) -> None:
    """Delete what processes left that were killed while they were saving; nobody else may be at work."""
    for entry in folder.glob(f".step-*{_WRITING_SUFFIX}"):
        shutil.rmtree(entry, ignore_errors=True)


def latest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with the newer ones that had to be skipped."""
    skipped: list[str] = []
    for step in sorted(_saved_steps(folder), reverse=True):
        path = checkpoint_path(folder, step)
        wrong = integrity_error(path)
        if wrong is None:
            return path, skipped
        skipped.append(wrong)
    return None, skipped


def set_aside(folder: Path, *others: str) -> Path | None:
    """Move all checkpoints, and the `others` of these names, into a folder of their own in `folder`."""
    found = [*(f"step-{step:08d}" for step in sorted(_saved_steps(folder))), *others]
    found = [name for name in found if os.path.lexists(folder / name)]
    if not found:
        return None
    aside = next(each for n in itertools.count(1) if not (each := folder / f"aside-{n}").exists())
    aside.mkdir()
    for name in found:
        (folder / name).rename(aside / name)
    return aside


def integrity_error(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        sums = json.loads((path / _MANIFEST_FILE).read_text(encoding="utf-8"))
        tensors = [file.name for file in path.glob(f"*{_DCP_SUFFIX}")]
        needed = {_STATE_FILE, _DCP_METADATA_FILE, *(tensors or [f"__0_0{_DCP_SUFFIX}"])}
        absent = sorted(needed - sums.keys() if isinstance(sums, dict) else needed)
        if absent:
            return f"{path / _MANIFEST_FILE} is damaged: it says nothing of {absent[0]}"
        for name, expected in sums.items():
            if _sha256(path / name) != expected:
                return f"{path / name} is damaged: its SHA-256 is not the one in {_MANIFEST_FILE}"
    except FileNotFoundError as error:
        return f"{path} is incomplete: {Path(error.filename).name} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{path} is damaged: {error}"
    return None


def load(path: Path, tensors: dict[str, Any], distributed: Distributed) -> dict[str, Any]:
    """Read a checkpoint into the given tensors, in place; returns the numbers."""
    try:
        with _single_process(distributed) as alone:
            dcp_load(tensors, checkpoint_id=path, no_dist=alone)
    except CheckpointException as error:
        raise ValueError(f"{path} does not hold what this run needs: {_root_cause(error)}") from None
    state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
    return state


def _write_tensors(fresh: Path, final: Path, tensors: dict[str, Any], distributed: Distributed) -> None:
    """Each rank its part; whoever fails, says why the checkpoint `final` could not be written."""
    try:
        with _single_process(distributed) as alone:
            dcp_save(tensors, checkpoint_id=fresh, no_dist=alone)
    except CheckpointException as error:  # derives from BaseException, so nobody else would catch it
        cause = _root_cause(error)
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, cause.strerror, str(final)) from None
        raise OSError(f"{final} could not be written: {cause}") from None
    distributed.barrier()


def _remove(path: Path) -> None:
    """Whatever it is; of a link only itself, and not what it leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def _single_process(distributed: Distributed) -> Iterator[bool]:
    """Whether there is one process only; torch's warning that there is no other is then no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield distributed.world_size == 1


def _root_cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed, down to the file system's own words."""
    cause: BaseException = next(iter(error.failures.values()))[0] if error.failures else error
    inner: BaseException | None = cause
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return cause


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step that a checkpoint was made after."""
    return int(path.name.removeprefix("step-"))


def _saved_steps(folder: Path) -> Iterator[int]:
    if folder.is_dir():
        for entry in folder.iterdir():
            if match := _STEP_FOLDER.fullmatch(entry.name):
                yield int(match[1])


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
