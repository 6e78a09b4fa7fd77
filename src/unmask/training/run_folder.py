"""The folder of a run, and all that is in it.

experiment.json      what is trained: the settings that weights depend on, and the digest of the corpus
model_config.json    the config of the network
tokenizer.json       the tokenizer of the model that the run was initialized from, if any
chat_template.json   the chat template of the model, if it has one
corpus/              the prepared text
step-*/              checkpoints
metrics.jsonl        losses, evaluations and throughput
model/               the exported model, when the run has finished
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unmask.config import from_json, to_json
from unmask.data.chat import ChatTemplate
from unmask.data.corpus import Corpus
from unmask.distributed import Distributed
from unmask.io.atomic import atomic_file, write_json
from unmask.io.locks import folder_lock
from unmask.io.untrusted import read_json_object
from unmask.registry import AllowCode
from unmask.training._checkpoint import CheckpointStore
from unmask.training.logger import METRICS_FILE, record_step
from unmask.training.trainer import Trainer

_RUN_FORMAT = "unmask-run-2"
_RUN_KEYS = ("format", "corpus_sha256", "extended_from")
"""Keys of experiment.json that are not settings of the experiment."""


class RunFolder:
    """A run's folder; all its files are read and written here.

    `allow_code`: which classes from outside the package its settings may name (see `unmask.config.from_json`).
    """

    def __init__(
        self,
        path: Path,
        distributed: Distributed = Distributed(),  # noqa: B008
        *,
        allow_code: AllowCode = False,
    ) -> None:
        self.path, self.distributed, self.allow_code = path, distributed, allow_code
        self.checkpoints = CheckpointStore(path, distributed)
        self.experiment_file = path / "experiment.json"
        self.model_config_file = path / "model_config.json"
        self.tokenizer_file = path / "tokenizer.json"
        self.chat_template_file = path / "chat_template.json"
        self.metrics_file = path / METRICS_FILE
        self.corpus = path / "corpus"
        self.model = path / "model"

    @contextmanager
    def claim(self) -> Iterator[None]:
        """No other process may train in the folder inside the `with` block.

        If the run is refused before it has written experiment.json, the folder is left as it was.
        """
        if not self.distributed.is_main:
            yield
            return
        created = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        before = set(os.listdir(self.path))
        try:
            with folder_lock(self.path):
                try:
                    yield
                except (ValueError, OSError):
                    if not self.experiment_file.exists():
                        _remove(
                            entry
                            for entry in (
                                self.corpus,
                                self.tokenizer_file,
                                self.chat_template_file,
                                self.model_config_file,
                            )
                            if entry.name not in before
                        )
                    raise
        finally:
            with suppress(OSError):  # those that are not empty
                for folder in created:
                    folder.rmdir()

    def read_experiment(self) -> dict[str, Any] | None:
        """experiment.json as it is; None if no run has started here."""
        if not self.experiment_file.exists():
            return None
        stored = read_json_object(self.experiment_file)
        if stored.get("format") != _RUN_FORMAT:
            raise ValueError(
                f"{self.experiment_file} is of another version of unmask, whose runs this one cannot continue:"
                " train again in another folder"
            )
        if not isinstance(stored.get("corpus_sha256"), str):
            raise ValueError(f"{self.experiment_file} is damaged: it does not have the corpus_sha256 of its text")
        return stored

    def read_settings(self) -> dict[str, Any]:
        """The settings of the experiment, as JSON."""
        stored = self.read_experiment()
        if stored is None:
            raise ValueError(f"{self.path} is not the folder of a run: it has no {self.experiment_file.name}")
        return settings_of(stored)

    def write_experiment(self, settings: dict[str, Any], corpus_digest: str, extended_from: list[int]) -> None:
        """Write experiment.json; `extended_from`: the numbers of steps that the run had before, if it was extended."""
        extensions = {"extended_from": extended_from} if extended_from else {}
        keys = {"format": _RUN_FORMAT, **settings, "corpus_sha256": corpus_digest, **extensions}
        write_json(self.experiment_file, keys)

    def write_model_config(self, config: dict[str, Any]) -> None:
        """Write model_config.json."""
        write_json(self.model_config_file, config)

    def write_tokenizer(self, tokenizer_json: str) -> None:
        """Write tokenizer.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.tokenizer_file) as file:
            file.write_text(tokenizer_json, encoding="utf-8")

    def write_chat_template(self, template: ChatTemplate) -> None:
        """Write chat_template.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.chat_template_file, to_json(template))

    def read_chat_template(self) -> ChatTemplate | None:
        """The chat template of the model that is trained; None if it has none."""
        if not self.chat_template_file.exists():
            return None
        stored = read_json_object(self.chat_template_file)
        template: ChatTemplate = from_json(ChatTemplate, stored, str(self.chat_template_file))
        return template

    def open_corpus(self) -> Corpus:
        """The verified corpus of a run that has started; if it is damaged, a sentence that says what to do."""
        try:
            return Corpus.open(self.corpus, allow_code=self.allow_code)
        except ValueError as error:
            damage = str(error).removesuffix("prepare it again")
            if damage == str(error):  # it is not damaged, but may not be read, say
                raise
            remedy = f"delete {self.corpus} and give the same command again, which prepares it anew"
            raise ValueError(f"{damage}{remedy}") from None

    def raise_if_changed(self, changes: list[str]) -> None:
        """Say what has changed since the run started, if anything has."""
        if changes:
            raise ValueError(
                f"{self.path} belongs to another experiment: {'; '.join(changes[:5])}."
                " Take another folder, or go back to what it was"
            )

    def resume(self, trainer: Trainer, restart: bool) -> list[str]:
        """Load the newest intact checkpoint, if there is any; messages for the log.

        `restart`: begin at step 1; the checkpoints and metrics of before are moved to a folder of their own.
        """
        messages, step = list[str](), -1
        if self.distributed.is_main:
            messages, step = self._find_checkpoint(restart)
        step = int(self.distributed.all_reduce_max(step))
        if step >= 0:
            trainer.load_checkpoint(self.checkpoints, step)
            messages.append(f"resumed from step {step}")
        return messages

    def _find_checkpoint(self, restart: bool) -> tuple[list[str], int]:
        messages, aside = list[str](), self.checkpoints.set_aside(METRICS_FILE) if restart else None
        if aside is not None:
            messages.append(f"starting anew; what was there is in {aside}")
        step, problems = self.checkpoints.latest()
        if step is None and problems:
            raise ValueError(
                f"{self.path} has no intact checkpoint: {'; '.join(problems)}. Bring one back, or give"
                " --restart to begin at step 1 again, which keeps what is there in another folder"
            )
        messages += [f"{problem}; an older checkpoint is used" for problem in problems]
        self.checkpoints.remove_leftovers()
        if step is None and (aside := self.checkpoints.set_aside(METRICS_FILE)) is not None:
            messages.append(f"there is no checkpoint yet, so this begins at step 1; the old metrics are in {aside}")
        return messages, -1 if step is None else step

    def is_finished(self, steps: int) -> bool:
        """Whether `model/` is the model after `steps` steps; that of a run that was extended may be older."""
        saved = self.checkpoints.steps()
        return self.model.is_dir() and (not saved or saved[0] >= steps)

    def last_evaluation(self) -> tuple[int, float, float] | None:
        """Step, nats per token and standard error of the last evaluation, if there was one."""
        last = None
        for line in self.metrics_file.read_bytes().split(b"\n") if self.metrics_file.exists() else ():
            if b"valid_nats_per_token" in line and (step := record_step(line)) is not None:
                record = json.loads(line)
                values = record["valid_nats_per_token"], record.get("valid_standard_error", 0.0)
                if all(isinstance(value, int | float) and math.isfinite(value) for value in values):
                    last = (step, float(values[0]), float(values[1]))
        return last


def settings_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of the experiment in the contents of an experiment.json."""
    return {key: value for key, value in stored.items() if key not in _RUN_KEYS}


def diff_settings(old: Any, new: Any, where: str = "") -> list[str]:
    """What differs between two settings as JSON; different spellings of one path do not."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in diff_settings(old.get(key), new.get(key), f"{where}.{key}".strip("."))]
    return [] if _normalize_path(old) == _normalize_path(new) else [f"{where} was {old!r} and is now {new!r}"]


def _normalize_path(value: Any) -> Any:
    """The same for all spellings of a path, and different for different words."""
    if isinstance(value, list):
        return [_normalize_path(item) for item in value]
    return os.path.realpath(value) if isinstance(value, str) and "\0" not in value else value


def _remove(entries: Iterator[Path]) -> None:
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
