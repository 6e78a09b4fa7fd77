"""Answer the requests of a file: what `infill`, `complete` and `score` do with `--input`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask import __version__
from unmask.batches import (
    AnswerFile,
    Answers,
    AnswersInMemory,
    Item,
    RequestFile,
    Task,
    answer_lines,
    parse_lines,
    plan_batches,
    read_requests,
    run_batches,
)
from unmask.cli._arguments import FileOptions, LoadOptions, load_distributed, model_fingerprint
from unmask.cli._progress import progress
from unmask.distributed import Distributed
from unmask.hardware.onednn import limit_onednn_caches
from unmask.model import LanguageModel
from unmask.provenance import collect_provenance

EXIT_SOME_FAILED = 4
"""The exit code if all requests were answered but some of them with an error."""
_STANDARD = Path("-")
_MAX_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class FileCommand:
    """A command on a file of requests."""

    model: Path
    files: FileOptions
    settings: Mapping[str, Any]
    """The options that answers depend on, by the names that an error message gives them."""
    seed: int
    make_task: Callable[[LanguageModel], Task]
    choose_dtype: Callable[[LanguageModel, str | None], str]
    """Choose the type in which the network computes, or the one that the run began with; returns it."""
    complete: Callable[[RequestFile, list[dict[str, Any]]], None] = lambda *_: None
    """Add to the answers what depends on all of them, and print what is to be told."""
    allow_code: bool = False
    both_strands: bool = False
    weights: LoadOptions = LoadOptions()

    def run(self) -> None:
        """Answer all requests; exits with `EXIT_SOME_FAILED` if some of them were wrong."""
        check_files(self.files)
        if self.weights.shard_weights:
            raise ValueError(
                "the ranks answer different requests of a file, each with all weights: drop --shard-weights"
            )
        limit_onednn_caches()
        requests = read_requests(self.files.input or _STANDARD)
        with load_distributed(self.model, self.allow_code, self.both_strands, self.weights) as (lm, _):
            num_failed = _FileRun(self, requests, lm).run()
        if num_failed:
            sys.exit(EXIT_SOME_FAILED)


def check_files(files: FileOptions) -> None:
    """Refuse files that cannot be used, before the model is loaded."""
    if files.output != _STANDARD:
        AnswerFile(files.output).check_path()
        if files.input is not None and files.input.resolve() == files.output.resolve():
            raise ValueError(f"{files.output} is --input as well: --output must be another file")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and _STANDARD in (files.input, files.output):
        raise ValueError("the ranks of torchrun share files, not standard input and output: name --input and --output")


class _FileRun:
    """One run of a command, on one rank."""

    def __init__(self, command: FileCommand, requests: RequestFile, lm: LanguageModel) -> None:
        self.command, self.requests, self.lm, self.ranks = command, requests, lm, lm.distributed
        alone = lm.with_plain_text().distribute(Distributed(device=self.ranks.device))
        self.task = command.make_task(alone)
        self.items, self.errors = parse_lines(self.task, requests.lines)
        self._refuse_if_all(self.errors)
        self.plan = plan_batches(self.items, self.task.max_tokens)

    def run(self) -> int:
        """Answer all requests; the number of those that failed."""
        output = self.command.files.output
        if output == _STANDARD:
            self.command.choose_dtype(self.lm, None)
            answers, failed = self._answer(AnswersInMemory())
            for line in _to_lines(answers):
                print(line)
            return len(failed)
        file = AnswerFile(output, self.ranks.rank)
        identity = self._identity() if self.ranks.is_main else {}
        if (known := self._finished(file, identity)) is not None:
            return known
        with self._open(file, identity) as noted:
            dtype = self.command.choose_dtype(self.lm, noted.get("dtype"))
            if self.ranks.is_main and "dtype" not in noted:
                file.note(identity, dtype=dtype)
            file.repair()
            try:
                answers, failed = self._answer(file)
            except KeyboardInterrupt:
                print("unmask: give the same command again to go on", file=sys.stderr)
                raise
            if self.ranks.is_main:
                file.write(_to_lines(answers), self._summary(dtype, len(failed)))
                print(output)
        return int(self.ranks.all_reduce_max(len(failed)))

    def _finished(self, file: AnswerFile, identity: Mapping[str, Any]) -> int | None:
        """The number of failed requests of the same run, if it is complete already."""
        count = -1.0
        if self.ranks.is_main and not self.command.files.restart:
            written = file.finished_run(identity)
            count = -1.0 if written is None else float(written["failed"])
        count = self.ranks.all_reduce_max(count)
        if count < 0:
            return None
        if self.ranks.is_main:
            print(f"unmask: {file.path} is complete already", file=sys.stderr)
            print(file.path)
        return int(count)

    @contextmanager
    def _open(self, file: AnswerFile, identity: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Rank 0 opens the run for all."""
        if not self.ranks.is_main:
            self.ranks.barrier()
            yield file.noted()
            return
        with file.open_run(identity, self.command.files.restart) as noted:
            self.ranks.barrier()
            yield noted

    def _answer(self, store: Answers) -> tuple[list[dict[str, Any]], dict[int, str]]:
        """Compute what is left; on rank 0, the answer to each line, and what was wrong with those that failed."""
        _print_errors(self.errors if self.ranks.is_main else {})
        done = store.read()
        self.ranks.barrier()  # no rank may append before all have read
        if done and self.ranks.is_main:
            print(f"unmask: going on after {len(done):,} of {len(self.plan):,} batches", file=sys.stderr)
        left = [number for number in range(len(self.plan)) if number not in done][
            self.ranks.rank :: self.ranks.world_size
        ]
        tokens = sum(self.items[index].length for number in left for index in self.plan[number])
        what = f"{len(self.requests.lines):,} requests"
        with progress(what, tokens, "tokens", quiet=not self.ranks.is_main) as report:
            run_batches(self.task, self.items, self.plan, store, left, report)
        self.ranks.barrier()
        if not self.ranks.is_main:
            return [], {}
        answers, failed = answer_lines(self.task, self.requests.lines, self.items, self.plan, store.read(), self.errors)
        if len(failed) == len(answers):
            store.discard()
        self._refuse_if_all(failed)
        _print_errors({number: error for number, error in failed.items() if number not in self.errors})
        self.command.complete(self.requests, answers)
        return answers, failed

    def _refuse_if_all(self, failed: Mapping[int, str]) -> None:
        if len(failed) == len(self.requests.lines):
            number, error = min(failed.items())
            raise ValueError(f"{self.requests.name} has no line that can be answered: line {number}: {error}")

    def _identity(self) -> dict[str, Any]:
        """All that answers depend on."""
        return {
            "input": self.requests.sha256,
            "model": model_fingerprint(self.command.model)["sha256"],
            **self.command.settings,
            "version of unmask": __version__,
            "plan of batches": _plan_digest(self.items, self.plan),
        }

    def _summary(self, dtype: str, num_failed: int) -> dict[str, Any]:
        command, name = self.command, self.requests.name
        source = collect_provenance(command.seed, {name: self.requests.sha256}, model_fingerprint(command.model))
        return {"requests": len(self.requests.lines), "failed": num_failed, "dtype": dtype, "provenance": source}


def _plan_digest(items: Sequence[Item], plan: Sequence[Sequence[int]]) -> str:
    places = [[(items[index].line, items[index].index, items[index].length) for index in batch] for batch in plan]
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()


def _to_lines(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (json.dumps(answer, ensure_ascii=False) for answer in answers)


def _print_errors(errors: Mapping[int, str]) -> None:
    for number, error in list(errors.items())[:_MAX_SHOWN_ERRORS]:
        print(f"unmask: line {number}: {error}", file=sys.stderr)
    if len(errors) > _MAX_SHOWN_ERRORS:
        print(f"unmask: and {len(errors) - _MAX_SHOWN_ERRORS:,} more lines", file=sys.stderr)
