"""Answers on disk: nothing is lost and nothing is computed twice, whenever the process is killed.

While requests are answered, OUTPUT.partial is a folder with `run.json`, which says what is being computed, and a
journal for each rank: a line for each finished batch, written through to the disk. A line that was cut off is not a
result, and is removed before anything is appended. At the end OUTPUT is written as a whole in the order of the
requests, with OUTPUT.run.json beside it, and the folder is removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from unmask.io.atomic import atomic_file, fsync, write_json
from unmask.io.checksums import sha256_of_file
from unmask.io.errors import os_errors_as_value_error
from unmask.io.locks import folder_lock
from unmask.io.untrusted import read_json_object

Results: TypeAlias = Mapping[int, Sequence[Any]]
"""The results of batches, by their numbers."""
Identity: TypeAlias = Mapping[str, Any]
"""All that answers depend on, by the name that an error message gives it: the input, the model, options."""

_MANIFEST = "run.json"
_MAX_SHOWN_CHARS = 60
"""Characters of two values that an error message shows."""


class Answers(Protocol):
    """Where the results of batches are kept until all are there."""

    def read(self) -> Results:
        """The results so far, of all ranks."""
        ...

    def append(self, batch: int, results: Sequence[Any]) -> None:
        """Keep the results of a batch."""
        ...

    def discard(self) -> None:
        """Forget all results."""
        ...


class AnswersInMemory:
    """Results that are lost with the process: for answers that go to standard output."""

    def __init__(self) -> None:
        self._results: dict[int, Sequence[Any]] = {}

    def read(self) -> Results:
        return dict(self._results)

    def append(self, batch: int, results: Sequence[Any]) -> None:
        self._results[batch] = results

    def discard(self) -> None:
        self._results.clear()


class AnswerFile:
    """The answers in a file, and before it is complete, in the folder beside it."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank
        self.folder = path.parent / f"{path.name}.partial"
        self._manifest = path.parent / f"{path.name}.{_MANIFEST}"
        self._journal = self.folder / f"rank-{rank}.jsonl"

    def check_path(self) -> None:
        """Refuse what cannot be such a file, before anything is computed."""
        if self.path.exists() and not self.path.is_file():
            kind = "a folder" if self.path.is_dir() else "not a plain file"
            raise ValueError(f"{self.path} is {kind}; --output must name a file, or - for standard output")
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.path} cannot be written: there is no folder {self.path.parent}")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder: it is where unfinished answers are kept; move it away")

    def finished_run(self, identity: Identity) -> dict[str, Any] | None:
        """The summary of the same run, if it is complete; None if there is none, or an unfinished one.

        ValueError if the file was not made by the same run.
        """
        if self.folder.exists() or not self.path.exists():
            return None
        if not self._manifest.exists():
            raise ValueError(f"{self.path} exists already; --restart replaces it")
        written = read_json_object(self._manifest)
        self._require_same(written.get("identity"), identity, str(self.path))
        if written.get("sha256") != sha256_of_file(self.path):
            raise ValueError(f"{self.path} has changed since it was written; --restart replaces it")
        return written

    @contextmanager
    def open_run(self, identity: Identity, restart: bool) -> Iterator[dict[str, Any]]:
        """Begin a run or go on with it, while no other process does; yields what `note` has noted of it."""
        with os_errors_as_value_error(self.folder, "written"):
            self.folder.mkdir(exist_ok=True)
        with folder_lock(self.folder):
            manifest = self.folder / _MANIFEST
            if restart:
                for file in self.folder.glob("*.json*"):
                    file.unlink()
            if manifest.exists():
                self._require_same(read_json_object(manifest).get("identity"), identity, str(self.folder))
            else:
                self.note(identity)
            yield read_json_object(manifest)

    def note(self, identity: Identity, **values: Any) -> None:
        """Keep values of this run for when it goes on."""
        with os_errors_as_value_error(self.folder, "written"):
            write_json(self.folder / _MANIFEST, {"identity": dict(identity), **values})

    def noted(self) -> dict[str, Any]:
        """What is noted of this run."""
        return read_json_object(self.folder / _MANIFEST)

    def read(self) -> Results:
        results: dict[int, Sequence[Any]] = {}
        for journal in sorted(self.folder.glob("rank-*.jsonl")):
            for line in journal.read_bytes().split(b"\n")[:-1]:
                with suppress(ValueError):  # a machine that lost its power may have written anything
                    record = json.loads(line)
                    results.setdefault(record["batch"], record["results"])
        return results

    def append(self, batch: int, results: Sequence[Any]) -> None:
        record = json.dumps({"batch": batch, "results": results}, ensure_ascii=False) + "\n"
        with os_errors_as_value_error(self._journal, "written"), self._journal.open("ab") as file:
            file.write(record.encode())
            file.flush()
            os.fsync(file.fileno())

    def discard(self) -> None:
        shutil.rmtree(self.folder)

    def repair(self) -> None:
        """Cut off what a killed process or a full disk has left of a line of this rank's journal."""
        if not self._journal.exists():
            return
        content = self._journal.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self._journal.open("r+b") as file:
                file.truncate(whole)
            fsync(self._journal)

    def write(self, answers: Iterator[str], summary: Mapping[str, Any]) -> None:
        """Replace the file by these lines, note what made it, and remove the folder."""
        with os_errors_as_value_error(self.path, "written"):
            with atomic_file(self.path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{line}\n" for line in answers)
            digest = {"sha256": sha256_of_file(self.path)}
            write_json(self._manifest, {"identity": self.noted()["identity"], **digest, **summary})
            shutil.rmtree(self.folder)

    def _require_same(self, written: Any, identity: Identity, what: str) -> None:
        """Refuse to go on with a run of something else, and name the first difference."""
        same = json.loads(json.dumps(dict(identity)))
        if not isinstance(written, dict):
            raise ValueError(f"{what} does not say what made it; --restart begins anew")
        for name in dict.fromkeys([*same, *written]):
            then, now = json.dumps(written.get(name)), json.dumps(same.get(name))
            if then != now:
                values = f" ({then} then, {now} now)" if len(then + now) <= _MAX_SHOWN_CHARS else ""
                raise ValueError(f"{what} was made with another {name}{values}; --restart begins anew")
