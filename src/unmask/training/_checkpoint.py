"""Crash-safe checkpoints: a new folder is written, fsynced, checksummed, then renamed.

`step-00001200/` holds distributed-checkpoint files of the run's tensors (each rank writes its part, any
number of ranks can read them), `state.json` for numbers, and, written last, `manifest.json` with the
SHA-256 of every file. A folder without a valid manifest is ignored. The tensors' metadata is a
pickle of torch's: it is the run's private state, never something to share (export makes that).
"""

from __future__ import annotations

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
from unmask.io.checksums import sha256_of_file
from unmask.io.errors import first_line

_MANIFEST_FILE, _STATE_FILE = "manifest.json", "state.json"
_DCP_METADATA_FILE, _DCP_SUFFIX, _WRITING_SUFFIX = ".metadata", ".distcp", ".writing"
_STEP_FOLDER = re.compile(r"step-(\d{8})")


class CheckpointStore:
    """The checkpoints of a run, in its folder."""

    def __init__(self, folder: Path, distributed: Distributed = Distributed()) -> None:  # noqa: B008
        self.folder, self.distributed = folder, distributed
        self._verified: set[int] = set()

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, damaged ones included, the newest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted((int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name))), reverse=True)

    def save(self, step: int, tensors: dict[str, Any], state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`: all of it or, if anything fails, nothing. Every rank must call this."""
        final, is_main = self.path(step), self.distributed.is_main
        if not self.distributed.any_rank(self.integrity_error(step) is not None):
            return final
        writing = self.folder / f".{final.name}{_WRITING_SUFFIX}"
        if is_main:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        self.distributed.barrier()
        try:
            self._write_tensors(writing, final, tensors)
            if is_main:
                _write_manifest(writing, state)
                _remove(final)
                writing.rename(final)
                fsync(self.folder)
        except BaseException:
            if is_main:
                shutil.rmtree(writing, ignore_errors=True)  # it may be what fills the disk
            raise
        self.distributed.barrier()
        return final

    def load(self, step: int, tensors: dict[str, Any]) -> dict[str, Any]:
        """Read the checkpoint of `step` into the given tensors, in place; its numbers."""
        path = self.path(step)
        try:
            with _single_process(self.distributed) as no_dist:
                dcp_load(tensors, checkpoint_id=path, no_dist=no_dist)
        except CheckpointException as error:
            raise ValueError(f"{path} does not hold what this run needs: {first_line(_root_cause(error))}") from None
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
        return state

    def latest(self) -> tuple[int | None, list[str]]:
        """The step of the newest intact checkpoint, and what is wrong with the newer ones."""
        problems: list[str] = []
        for step in self.steps():
            problem = self.integrity_error(step)
            if problem is None:
                return step, problems
            problems.append(problem)
        return None, problems

    def delete_old(self, keep: int) -> None:
        """Delete the oldest: `keep` intact ones, and never fewer than two, are left.

        A damaged one does not count: it stays until there are enough intact ones that are newer. Each is
        verified once.
        """
        if not self.distributed.is_main:
            return
        intact = 0
        for step in self.steps():
            if intact >= max(2, keep):
                _remove(self.path(step))
            elif step in self._verified or self.integrity_error(step) is None:
                self._verified.add(step)
                intact += 1

    def remove_leftovers(self) -> None:
        """Delete what processes left that were killed while they were saving; none may be running."""
        for entry in self.folder.glob(f".step-*{_WRITING_SUFFIX}"):
            shutil.rmtree(entry, ignore_errors=True)

    def set_aside(self, *others: str) -> Path | None:
        """Move all checkpoints, and the files of the folder named in `others`, into a new folder `aside-N`."""
        names = [*(self.path(step).name for step in reversed(self.steps())), *others]
        names = [name for name in names if os.path.lexists(self.folder / name)]
        if not names:
            return None
        aside = next(path for n in itertools.count(1) if not (path := self.folder / f"aside-{n}").exists())
        aside.mkdir()
        for name in names:
            (self.folder / name).rename(aside / name)
        return aside

    def integrity_error(self, step: int) -> str | None:
        """What is wrong with the checkpoint of a step, or None."""
        path = self.path(step)
        try:
            sums = json.loads((path / _MANIFEST_FILE).read_text(encoding="utf-8"))
            tensors = [file.name for file in path.glob(f"*{_DCP_SUFFIX}")]
            needed = {_STATE_FILE, _DCP_METADATA_FILE, *(tensors or [f"__0_0{_DCP_SUFFIX}"])}
            missing = sorted(needed - sums.keys() if isinstance(sums, dict) else needed)
            if missing:
                return f"{path / _MANIFEST_FILE} is damaged: it does not list {missing[0]}"
            for name, expected in sums.items():
                if sha256_of_file(path / name) != expected:
                    return f"{path / name} is damaged: its SHA-256 is not the one in {_MANIFEST_FILE}"
        except FileNotFoundError as error:
            return f"{path} is incomplete: {Path(error.filename).name} is missing"
        except (OSError, ValueError, RecursionError) as error:
            return f"{path} is damaged: {error}"
        return None

    def _write_tensors(self, writing: Path, final: Path, tensors: dict[str, Any]) -> None:
        """Each rank writes its part; an error names the checkpoint `final` that could not be written."""
        try:
            with _single_process(self.distributed) as no_dist:
                dcp_save(tensors, checkpoint_id=writing, no_dist=no_dist)
        except CheckpointException as error:  # derives from BaseException, so nothing else would catch it
            cause = _root_cause(error)
            if isinstance(cause, OSError) and cause.errno is not None:
                raise OSError(cause.errno, cause.strerror, str(final)) from None
            raise OSError(f"{final} could not be written: {first_line(cause)}") from None
        self.distributed.barrier()


def _write_manifest(folder: Path, state: dict[str, Any]) -> None:
    """The numbers, then the manifest of all files; everything reaches the disk."""
    (folder / _STATE_FILE).write_text(json.dumps(state, indent=2), encoding="utf-8")
    sums = {file.name: sha256_of_file(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST_FILE).write_text(json.dumps(sums, indent=2), encoding="utf-8")
    for entry in [*folder.iterdir(), folder]:
        fsync(entry)


def _remove(path: Path) -> None:
    """Delete a file or folder; of a link only the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def _single_process(distributed: Distributed) -> Iterator[bool]:
    """Whether there is one process only; torch's warning about that is silenced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield distributed.world_size == 1


def _root_cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed, down to that of the file system."""
    cause: BaseException = next(iter(error.failures.values()))[0] if error.failures else error
    inner: BaseException | None = cause
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return cause
